"""Facts about an SGLang server: its arguments, which it reports in full, and its statistics."""

from __future__ import annotations

from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.reports import Capabilities, EngineStats
from headrace.engine.remote.dialects.labelled import ServerFacts, sums_of


def meet(url: str, info: Any) -> ServerFacts:
    """`info`: the answer of `/get_server_info`, the server's arguments beside facts of its scheduler. Raises ConfigError for a server
    that was started without what a run needs, with the options to start it with."""
    try:
        version, dtype = str(info["version"]), str(info["dtype"])
        length, incremental = int(info["max_req_input_len"]), bool(info["incremental_streaming_output"])
        facts = ServerFacts(
            dtype=dtype,
            capabilities=Capabilities(
                context_length=length,
                path=f"sglang {version}",
                masks=True,
                adapters=_adapters(info),
                spans=True,
                prompt_logprobs=True,
            ),
            priorities=bool(info.get("enable_priority_scheduling")),
            metrics=bool(info.get("enable_metrics")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{url} does not describe itself as SGLang 0.5 does: {error!r}") from None
    if dtype == "auto":
        raise ConfigError(
            f"the server at {url} was started with --dtype auto, so that nobody can tell what it computes in; start SGLang with --dtype "
            "bfloat16 (or float32), and set engine.dtype to the same"
        )
    if not incremental:
        raise ConfigError(
            f"the server at {url} repeats the whole completion in every event of a stream; start SGLang with "
            "--incremental-streaming-output"
        )
    return facts


def _adapters(info: Any) -> int:
    """Adapters that it serves at once. While one is updated, the version before is still loaded."""
    if not info.get("enable_lora"):
        return 0
    served, loaded = int(info["max_loras_per_batch"]), info.get("max_loaded_loras")
    return served if loaded is None else max(0, min(served, int(loaded) - 1))


def statistics(text: str) -> EngineStats:
    """Reads the Prometheus text of `/metrics`, summed over the schedulers behind the server. Zeros for an empty text."""
    sums = sums_of(text, "sglang")

    def count(name: str) -> int:
        return int(sums.get(name, 0))

    return EngineStats(
        running=count("num_running_reqs"),
        waiting=count("num_queue_reqs"),
        kv_used=sums.get("token_usage", 0.0),
        sampled_tokens=count("generation_tokens"),
        prompt_tokens=max(0, count("prompt_tokens") - count("cached_tokens")),
        asked_tokens=count("prompt_tokens"),
        cached_tokens=count("cached_tokens"),
    )
