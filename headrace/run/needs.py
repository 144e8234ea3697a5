"""The needs that a run has of its engines. A run whose engine lacks something is refused at its start, with the setting to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.reports import Capabilities
from headrace.run.config import RunConfig, adapter_runs

ONE_VERSION = ("abort_resume", "save_resume", "drain", "barrier")
"""The values of `partial.mode` with which each request is sampled under one version from start to end."""


@dataclass(frozen=True)
class EngineNeed:
    """One need. `asks`: whether a run has it. `has`: whether an engine can serve it for this run."""

    asks: Callable[[RunConfig], bool]
    has: Callable[[Capabilities, RunConfig], bool]
    cannot: str
    """Completes "this engine cannot ..."."""
    remedy: str


NEEDS = {
    "stop_strings": EngineNeed(
        lambda run: bool(run.rollout.stop),
        lambda engine, run: engine.stop_strings,
        "end completions at strings (the model has no tokenizer it can use)",
        "remove rollout.stop",
    ),
    "masks": EngineNeed(
        lambda run: run.rollout.keep_mask and run.rollout.truncates,
        lambda engine, run: engine.masks,
        "report which tokens a constraint, top_p, top_k and min_p left, which the trainer needs",
        "remove rollout.constraint, rollout.top_p, rollout.top_k and rollout.min_p",
    ),
    "constraints": EngineNeed(
        lambda run: run.rollout.constraint.constraint is not None,
        lambda engine, run: engine.constraints,
        "hold completions to a language (the model has no tokenizer it can use)",
        "remove rollout.constraint",
    ),
    "routing": EngineNeed(
        lambda run: run.rollout.keep_routing,
        lambda engine, run: engine.routing,
        "report which experts it chose",
        "set rollout.keep_routing = false",
    ),
    "adapters": EngineNeed(
        lambda run: run.adapters_served > 0,
        lambda engine, run: engine.adapters >= run.adapters_served,
        "serve as many LoRA adapters beside the model as the run trains",
        'set lora.publish = "merged", which serves them as full weights, or train fewer at once',
    ),
    "streamed": EngineNeed(
        lambda run: run.partial.mode == "stream",
        lambda engine, run: engine.streamed,
        "load an update in parts",
        'set partial.mode = "inflight"',
    ),
    "spans": EngineNeed(
        lambda run: any(config.partial.mode not in ONE_VERSION for config in (run, *adapter_runs(run))),
        lambda engine, run: engine.spans,
        "report which version of the weights sampled each token, when they are swapped in the middle of a completion",
        'set partial.mode = "abort_resume" (or save_resume, drain, barrier)',
    ),
    "prompt_logprobs": EngineNeed(
        lambda run: run.watch.identity_every > 0 or (run.algo.reference_in_reward and run.adapters_served > 0),
        lambda engine, run: engine.prompt_logprobs,
        "return the log-probs of given tokens, which prove that it serves the trainer's weights",
        "set watch.identity_every = 0, and algo.kl.place = loss where it is reward",
    ),
    "arithmetic": EngineNeed(
        lambda run: run.train.parity == "bitwise",
        lambda engine, run: bool(engine.arithmetic),
        "compute the log-probs that the trainer does, bit for bit",
        'set train.parity = "off", or serve a model, dtype and path for which that is proven (docs/parity.md)',
    ),
    "exact": EngineNeed(
        lambda run: run.engine.exact,
        lambda engine, run: engine.exact,
        "compute each request independently of the others, bit for bit",
        "set engine.exact = false",
    ),
}
"""All needs, by the field of `Capabilities` that they refer to."""

ASKED_BY_NOBODY = ("context_length", "path", "forks", "top_logprobs", "rows", "kv_tokens")
"""Fields of `Capabilities` that no setting of a run needs. `context_length` is used to check prompts, forks are made by callers of the
engine, `top_logprobs` are needed of teachers (`check_teacher`), and a fleet places requests by `rows` and `kv_tokens`."""


def lacking(capabilities: Capabilities, config: RunConfig) -> Iterator[str]:
    """A sentence for each need of the run that the engine cannot serve."""
    for need in NEEDS.values():
        if need.asks(config) and not need.has(capabilities, config):
            yield f"this engine ({capabilities.path}) cannot {need.cannot}; {need.remedy}"


def check_needs(capabilities: Capabilities, config: RunConfig) -> None:
    """Raises ConfigError with everything that the engine lacks, one sentence per line."""
    if problems := list(lacking(capabilities, config)):
        raise ConfigError("\n".join(problems))


def check_parity(capabilities: Capabilities, arithmetic: str, parity: str) -> bool:
    """Returns whether engine and trainer compute one forward pass, bit for bit. `arithmetic`: of the trainer; `parity`: `train.parity`. Raises ConfigError
    where train.parity asks for one forward pass and there are two."""
    if parity == "bitwise" and capabilities.arithmetic != arithmetic:
        raise ConfigError(
            f'train.parity = "bitwise" asks for one forward pass, and the engine computes {capabilities.arithmetic or "another"} where the trainer '
            f'computes {arithmetic or "another"}; give engine.dtype and train.dtype the same value, or set train.parity = "off"'
        )
    return bool(arithmetic) and capabilities.arithmetic == arithmetic


def check_teacher(who: str, capabilities: Capabilities, top: int) -> None:
    """Raises ConfigError for an engine that cannot serve as a teacher. `top`: number of most probable tokens needed per position."""
    if not capabilities.prompt_logprobs:
        raise ConfigError(
            f"the engine of the {who} ({capabilities.path}) cannot return the log-probs of given tokens, which a teacher is "
            "needed for; serve it with the native engine"
        )
    if top and not capabilities.top_logprobs:
        raise ConfigError(
            f"the engine of the {who} ({capabilities.path}) cannot return the most probable tokens of a position, which "
            'algo.distill.kind = "forward", "reverse" and "jsd" compare; choose "sampled", or serve it with the native engine'
        )
