"""Facts about a vLLM server: its settings, which it reports in full, and its statistics."""

from __future__ import annotations

from headrace.core.errors import ConfigError
from headrace.core.reports import Capabilities, EngineStats
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialects.labelled import ServerFacts, sums_of
from headrace.engine.remote.errors import Unreachable

MEETING = 120.0
"""Seconds in which the settings must be there: vLLM collects facts about its machine first."""


async def meet(connection: Connection, seconds: float) -> ServerFacts:
    """Raises ConfigError for a server that was started without what a run needs, with the options to start it with."""
    seconds = max(seconds, MEETING)
    version = str((await connection.get("/version", seconds))["version"])
    described = await connection.get("/server_info?config_format=json", seconds)
    try:
        config, env = described["vllm_config"], described["vllm_env"]
        model, lora = config["model_config"], config["lora_config"]
        mode, length = model["logprobs_mode"], model["max_model_len"]
        loads = str(env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", False)).lower() in ("true", "1")
        facts = ServerFacts(
            dtype=str(model["dtype"]).removeprefix("torch."),
            capabilities=Capabilities(
                context_length=length - 1,  # behind a prompt that it scores, too, it samples one token
                path=f"vllm {version}",
                adapters=lora["max_loras"] if lora and loads else 0,
                spans=True,
                constraints=True,
                prompt_logprobs=True,
            ),
            priorities=config["scheduler_config"]["policy"] == "priority",
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{connection.url} (vLLM {version}) does not describe itself as vLLM 0.32 does: {error!r}"
        ) from None
    if mode != "processed_logprobs":
        raise ConfigError(
            f"the server at {connection.url} returns {mode}, and a trainer needs the log-probs of the distribution that was sampled from; "
            "start vLLM with --logprobs-mode processed_logprobs"
        )
    await _check_generation(connection, seconds)
    return facts


async def find_transfer_engine(connection: Connection, seconds: float) -> None:
    """Raises ConfigError for a server that cannot fetch weights (`weight_sync/in_vllm/`)."""
    try:
        await connection.tell("/init_weight_transfer_engine", {"init_info": {}}, seconds)
    except (ValueError, Unreachable) as error:
        if isinstance(error, Unreachable) and not error.status:
            raise
        raise ConfigError(
            f"vLLM at {connection.url} cannot fetch weights over HTTP ({error}); install headrace in its environment and start it with "
            '--weight-transfer-config \'{"backend": "headrace"}\', or set weight_sync.kind = "files"'
        ) from None


async def _check_generation(connection: Connection, seconds: float) -> None:
    """A request without tokens is refused in one way by a server that generates, and in another by one that does not."""
    try:
        await connection.tell("/inference/v1/generate", {}, seconds)
    except ConfigError as error:
        raise ConfigError(f"{error}. vLLM generates from tokens if it is started with --enable-scale-out") from None
    except ValueError:
        return


def statistics(text: str) -> EngineStats:
    """Reads the Prometheus text of `/metrics`. Sums over the engines behind the server."""
    sums = sums_of(text, "vllm")

    def count(name: str) -> int:
        return int(sums.get(name, 0))

    return EngineStats(
        running=count("num_requests_running"),
        waiting=count("num_requests_waiting"),
        kv_used=sums.get("kv_cache_usage_perc", 0.0),
        sampled_tokens=count("generation_tokens"),
        prompt_tokens=count("prompt_tokens"),
        asked_tokens=count("prefix_cache_queries"),
        cached_tokens=count("prefix_cache_hits"),
        preemptions=count("num_preemptions"),
    )
