"""The dialect of SGLang 0.5: token-in/token-out streams of `/generate`, weights by files, adapters by path.

Routes and fields are those of SGLang's own documentation (docs.sglang.io, "SGLang for RL Systems", "Sampling Parameters", "LoRA Serving")
and source (`entrypoints/http_server.py`, `managers/io_struct.py`, `managers/tokenizer_manager.py`, `utils/weight_versions.py`). It has
been run against the fake server only (`testing/servers/fake_sglang.py`), never against SGLang itself.

**Versions.** Every event of a stream names the labels of its tokens. SGLang clears its cache of prefixes only while it has no request, and
a clearing that fails ends its scheduler (`managers/scheduler_components`, "Cache flush failed"): so the pause before an update is in the
mode `abort`.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.core.errors import ConfigError
from headrace.core.reports import Capabilities, EngineStats
from headrace.core.steps import Finished, PromptScores, TokenDetails
from headrace.core.types import Request
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.connection import Connection, Unreachable
from headrace.engine.remote.dialect import ENDS, Heard, LabelledDialect, ServerFacts, ServerState, TokenSpan, sums_of
from headrace.engine.remote.server_kind import HOST, Control, Place, ServerKind, Startable
from headrace.models.tokenizer import end_tokens
from headrace.settings.extras import Found

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig

# --- Facts about an SGLang server
# Its arguments, which it reports in full, and its statistics.


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


# --- sglang ------------------------------------------------------------


class SglangDialect(LabelledDialect):
    """Protocol `Dialect`."""

    kind = "SGLang"

    async def look(self, connection: Connection, seconds: float) -> ServerState:
        """Raises IdentityError where somebody else has labelled the weights meanwhile."""
        label = await self._label_of(connection, seconds)
        if self._loading.locked() and self._state:  # its scheduler answers nobody while it reads weights
            return self._state
        info = await connection.get("/get_server_info", seconds)  # answered by the scheduler: it lives
        if not self._is_met(connection.url, label):
            async with self._meeting:  # several requests look when a process has ended: they meet the next one once
                if not self._is_met(connection.url, await self._label_of(connection, seconds)):
                    relabel = {"new_version": self._met(meet(connection.url, info)), "abort_all_requests": False}
                    await connection.tell("/update_weight_version", relabel, seconds)
        metrics = await connection.text("/metrics", seconds) if self._facts.metrics else ""
        return self._seen(statistics(metrics))

    async def _label_of(self, connection: Connection, seconds: float) -> str:
        return str((await connection.get("/model_info", seconds)).get("weight_version"))

    # -- requests -----------------------------------------------------------------------------------------------------------

    def ask(self, request: Request, wire_id: str) -> tuple[str, dict[str, Any]]:
        """`Sampling.seed` is not sent: a request that goes on from its prefix under the same seed would be drawn with the numbers that
        drew its first tokens."""
        unstopped = request.sampling.ignore_eos and request.sampling.stop_token_ids
        constraint = request.sampling.constraint
        self._refuse(
            request,
            {
                "stop tokens beside ignore_eos, with which it goes by none": unstopped,
                "a bias of logits by this name": request.sampling.logit_bias,
                "sampling masks of a constraint": constraint and request.return_mask,
                "a constraint from the middle of a completion on": constraint and (request.prefix or constraint.after),
                "a grammar of this format": constraint and constraint.kind == "grammar",
            },
        )
        sampling, scores = request.sampling, request.prompt_logprobs
        drawn: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens - len(request.prefix),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop_token_ids": sorted(self._stops(request)),
            "ignore_eos": sampling.ignore_eos,
        }
        if constraint:
            choices = json.loads(constraint.text) if constraint.kind == "choice" else ()
            name = "json_schema" if constraint.kind == "json_schema" else "regex"
            drawn[name] = f"({'|'.join(map(re.escape, choices))})" if choices else constraint.text
        body: dict[str, Any] = {
            "rid": f"{wire_id}/",  # a request that is left takes all with it whose ids begin with its own
            "input_ids": [*request.prompt, *request.prefix],
            "sampling_params": drawn,
            "return_logprob": True,
            "logprob_start_len": 0 if scores else -1,
            "stream": not scores,
        }
        if _truncates(request):
            body["return_sampling_mask"] = True
        if self._facts.priorities:
            body["priority"] = request.priority
        if request.adapter:
            body["lora_path"] = self._live[request.adapter].name
        return "/generate", body

    def _stops(self, request: Request) -> set[int]:
        sampling = request.sampling
        return set() if sampling.ignore_eos else set(sampling.stop_token_ids) | self._ends

    def _heard(self, event: Any, request: Request) -> Heard:
        if "error" in event:
            raise _refusal(event["error"])
        meta, live = event["meta_info"], self._live[request.adapter]
        # Servers before 0.5.19 name only the label of the moment.
        self._check_labels(
            [span["version"] for span in meta.get("weight_versions") or ()] + [str(meta["weight_version"])]
        )
        if request.prompt_logprobs:
            logprobs = _prompt_logprobs(meta["input_token_logprobs"], request.prompt)
            return Heard(
                scores=PromptScores(request.id, live.update.version, logprobs), end=Finished(request.id, "length")
            )
        tokens, reason = event["output_ids"], (meta["finish_reason"] or {}).get("type")
        run = TokenSpan(
            tokens=tokens,
            logprobs=_logprobs(meta, tokens, _truncates(request)),
            version=live.update.version,
            kv_version=live.update.version,
            fingerprint="",
        )
        return Heard(
            runs=[run] if tokens else [],
            details=_details(meta, request, len(tokens)),
            end=Finished(request.id, ENDS[reason]) if reason in ENDS else None,
            cut_off=reason is not None and reason not in ENDS,
        )

    # -- weights ------------------------------------------------------------------------------------------------------------

    async def _load_base(self, connection: Connection, update: WeightUpdate, label: str, seconds: float) -> None:
        weights = {
            "model_path": str(update.where["path"]),
            "load_format": "safetensors",  # else that of its start, which may be `dummy`
            "weight_version": label,
            "flush_cache": True,
        }
        await connection.tell("/pause_generation", {"mode": "abort"}, seconds)
        await self._check_met(connection, seconds)
        await connection.tell("/update_weights_from_disk", weights, seconds)
        await connection.tell("/continue_generation", {}, seconds)

    async def _is_refusal(self, connection: Connection, error: ValueError | Unreachable, seconds: float) -> bool:
        return isinstance(error, ValueError)


def _truncates(request: Request) -> bool:
    """Whether a request is drawn from a part of the vocabulary. SGLang's usual log-probs are those of the whole, at the temperature."""
    sampling = request.sampling
    return request.return_mask or sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


def _refusal(error: Any) -> Exception:
    """SGLang begins a stream before it has checked the request, so its refusals are events."""
    message, code = str(error["message"]), error.get("code", 400)
    return ValueError(message) if code == 400 else Unreachable(message)


def _logprobs(meta: Any, tokens: Sequence[int], truncated: bool) -> list[float]:
    rows = meta["output_token_logprobs"]
    if [row[1] for row in rows] != list(tokens):
        raise Unreachable(f"the server sent {len(tokens)} tokens and {len(rows)} log-probs of others")
    if not truncated:
        return [_number(row[0]) for row in rows]
    _check_masks(meta, len(tokens))
    return [_number(value) for value in meta["output_token_sampling_logprobs"]] if tokens else []


def _check_masks(meta: Any, count: int) -> None:
    """Raises ConfigError for a server that leaves out the field for masks as one that it does not know."""
    for name in ("output_token_sampling_mask", "output_token_sampling_logprobs"):
        if len(meta.get(name) or ()) != count:
            raise ConfigError(
                f"the server returned no {name} for each of {count} tokens: it knows no return_sampling_mask, or ignores it. Remove "
                "rollout.top_p, rollout.top_k and rollout.min_p, or start a version of SGLang that does"
            )


def _details(meta: Any, request: Request, count: int) -> list[TokenDetails]:
    if not request.return_mask:
        return []
    _check_masks(meta, count)
    masks = meta["output_token_sampling_mask"] if count else []
    return [TokenDetails(request.id, b"", b"", array("i", mask).tobytes()) for mask in masks]


def _prompt_logprobs(rows: Any, prompt: tuple[int, ...]) -> tuple[float, ...]:
    """`rows`: (log-prob, token, text) of every token; the first has no log-prob."""
    if [row[1] for row in rows] != list(prompt):
        raise Unreachable(f"the server scored {len(rows)} tokens that are not the {len(prompt)} of the prompt")
    return tuple(_number(row[0]) for row in rows[1:])


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


RESERVED = 6
"""Tokens of its context that SGLang lets no prompt have (`managers/scheduler.py` and `managers/tp_worker.py`, `max_req_input_len`)."""


def _command(config: EngineConfig, found: Found, place: Place) -> tuple[list[str], dict[str, str]]:
    words = [found.python, "-m", "sglang.launch_server", "--model-path", str(place.model)]
    words += ["--host", HOST, "--port", str(place.port), "--config", str(place.token_file)]
    words += ["--dtype", config.serving_dtype, "--context-length", str(config.context_length + RESERVED)]
    words += ["--incremental-streaming-output", "--enable-metrics"]
    if (rows := config.open_sizes.max_running) is not None:
        words += ["--max-running-requests", str(rows)]
    if adapters := max(config.max_adapters, place.adapters):
        # One more: during an update the version before is still loaded.
        words += ["--enable-lora", "--max-loras-per-batch", str(adapters + 1), "--max-loaded-loras", str(adapters + 2)]
        words += ["--max-lora-rank", str(place.rank), "--lora-target-modules", "all"]
    return words, {}


SERVER = ServerKind(
    words="SGLang",
    about="an SGLang server, which the run starts, unless `urls` names one",
    untried="a real SGLang server, only a fake that refuses what its documentation does not have",
    dialect=lambda server: SglangDialect(end_tokens(server.model_dir)),
    starts=Startable(
        modules=[["sglang", "sglang"]],
        install="python -m venv ~/sglang && ~/sglang/bin/pip install sglang",
        command=_command,
        settings=("max_running", "max_adapters"),
        # A file of settings, because others on its machine can read the words of a command.
        token_file=(".yaml", "api-key: {}\n"),
    ),
    control=Control(
        "/get_server_info",
        "/pause_generation, /update_weights_from_disk, /load_lora_adapter",
        "start SGLang with --api-key, and name the file that holds the key in engine.token_file",
    ),
)
