"""Writes docs/models.md, the matrix of all architectures that transformers calls causal: `make models`.

A small model of each (`headrace/testing/small_models.py`) is saved, served by the native engine and compared with transformers' own forward pass, and stepped
by the trainer, whose gradient is compared with plain autograd.
"""

from __future__ import annotations

import dataclasses
import math
import re
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.errors import ConfigError
from headrace.core.types import Prompt, Request, Sampling
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.runners.skeleton import unservable
from headrace.engine.native.served_how import SPEEDS
from headrace.models.saved_buffers import saved_buffers
from headrace.testing.makers import update
from headrace.testing.small_models import TYPES, VOCABULARY, small_config, small_model
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.trainer import TorchTrainer

PAGE = Path(__file__).parent / "models.md"
TOLERANCE = 1e-5
"""Largest difference of log-probs in float32."""
RECURRENT_TOLERANCE = 1e-4
"""Of models that compute a prompt and a token in two ways, with sums in another order. Nemotron-H is at 7e-5 in transformers itself: it bounds the steps of time from
below in a pass over a text, and not token by token; without the bound the difference is 2e-6."""
SHOWN = 1e-5
"""Differences up to this are not shown one by one."""
SECONDS = 60
PROMPTS = ((9, 8), (40, 8), (17, 5), (23, 8), (9, 6))
"""Tokens of each prompt and of its completion. Four run together, the last one begins where another has ended, and windows and sparse attention see a part
of the longer ones."""
GROUPS = ((12, (9, 17, 5)), (30, (6,)))
"""Tokens of the prompt and of each completion of the groups of a step: siblings, and a row longer than the windows."""
GRADIENT_TOLERANCE = 1e-3
"""Largest difference of gradients in float32, in parts of the largest gradient. Sums in float32 are up to 2e-4 from those in float64 (Gemma 4); one of the 37 tokens
that was left out, or saw another's text, would be a hundredth or more."""


@dataclass(frozen=True)
class Tried:
    """A row of the matrix."""

    model_type: str
    outcome: str
    """`served`, `refused`, `differs`, or `not tried`."""
    path: str = ""
    difference: float = 0.0
    """Largest |Δ log-prob| of the sampled tokens."""
    reason: str = ""
    trained: str = ""
    """The trainer's way, as it names it, `refused`, or what it raised."""
    gradient: float = math.nan
    """Largest |Δ gradient| in parts of the largest gradient. Not a number where nothing was trained."""
    replayed: str = ""
    """Largest |Δ log-prob| between the engine and the trainer that replays its experts, `refused`, or what was raised; empty where there are none."""


class Late(Exception):
    """A model took too long."""


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Late(f"more than {seconds} seconds")

    signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)  # of CPU time
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def tried(model_type: str) -> Tried:
    """One row of the matrix."""
    with tempfile.TemporaryDirectory() as name, limit(SECONDS):
        directory = Path(name) / model_type
        try:
            if reason := unservable(small_config(model_type)):
                return Tried(model_type, "refused", reason=reason)
            model = small_model(model_type)
            model.save_pretrained(directory)
            (directory / "chat_template.jinja").write_text("{{ messages }}")
            _difference(model, _prompt(8), [(0, 0.0)])  # can transformers run it?
        except Exception as error:
            return Tried(model_type, "not tried", reason=_words(error))
        row = dataclasses.replace(_served(model_type, model, directory), **_trained(model, directory))
        if row.outcome == "served" and _has_experts(model):
            row = dataclasses.replace(row, replayed=_replayed(model, directory))
        return row


def _served(model_type: str, model: torch.nn.Module, directory: Path) -> Tried:
    try:
        return _compared(model_type, model, directory)
    except ConfigError as error:
        return Tried(model_type, "refused", reason=_reason(str(error)))
    except Late:
        raise
    except Exception as error:
        return Tried(model_type, "differs", reason=_words(error))


def _engine(model: torch.nn.Module, directory: Path, **more: Any) -> NativeEngine:
    settings = EngineConfig(
        dtype="float32", device="cpu", kv_gib=0.02, max_running=4, context_length=80, prefill_chunk=16, **more
    )
    engine = NativeEngine(directory, settings)
    tensors = (*model.named_parameters(), *saved_buffers(model).items())
    engine.swap(engine.prepare(update(0), {name: tensor.detach() for name, tensor in tensors}))
    return engine


def _compared(model_type: str, model: torch.nn.Module, directory: Path) -> Tried:
    engine = _engine(model, directory)
    told: dict[str, list[tuple[int, float]]] = {}
    prompts = {str(number): _prompt(length, number) for number, (length, _) in enumerate(PROMPTS)}
    for (request_id, prompt), (_, tokens) in zip(prompts.items(), PROMPTS, strict=True):
        engine.add(Request(request_id, prompt, Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)))
    while engine.has_work():
        output = engine.step()
        for finished in output.finished:
            if finished.stop == "error":
                return Tried(model_type, "differs", engine.capabilities.path, reason=finished.error)
        for request_id, token, logprob in zip(output.request_ids, output.tokens, output.logprobs, strict=True):
            told.setdefault(request_id, []).append((token, logprob))
    path = engine.capabilities.path
    worst = max(_difference(model, prompt, told[request_id]) for request_id, prompt in prompts.items())
    served = worst <= (RECURRENT_TOLERANCE if path.startswith("own cache") else TOLERANCE)
    return Tried(model_type, "served" if served else "differs", path, worst)


def _has_experts(model: torch.nn.Module) -> bool:
    return any(p.ndim == 3 and "expert" in name for name, p in model.named_parameters())


def _replayed(model: torch.nn.Module, directory: Path) -> str:
    """`Tried.replayed`: the engine samples and records, the trainer scores these tokens with the recorded experts, none missing."""
    try:
        engine = _engine(model, directory, routing=True)
        trainer = TorchTrainer(
            directory, TrainConfig(dtype="float32", device="cpu"), AlgoConfig(), seed=0, keep_routing=True
        )
    except ConfigError:
        return "refused"
    prompts = {str(number): _prompt(length, number) for number, (length, _) in enumerate(PROMPTS)}
    for number, (request_id, prompt) in enumerate(prompts.items()):
        sampling = Sampling(max_tokens=8, seed=number, ignore_eos=True)
        engine.add(Request(request_id, prompt, sampling, return_routing=True))
    told: dict[str, list[tuple[int, float]]] = {}
    routing: dict[str, Any] = {}
    while engine.has_work():
        output = engine.step()
        for request_id, token, logprob in zip(output.request_ids, output.tokens, output.logprobs, strict=True):
            told.setdefault(request_id, []).append((token, float(logprob)))
        routing |= {finished.request_id: finished.routing for finished in output.finished}
    rows = []
    for request_id, prompt in prompts.items():
        (tokens, known), size = zip(*told[request_id], strict=True), len(told[request_id])
        rows.append(Row(prompt, tokens, known, (1.0,) * size, (True,) * size, (0,) * size, routing=routing[request_id]))
    (plan,) = trainer._plans(Batch(0, (Group(0, Prompt("p", "", rows[0].prompt), (), tuple(rows)),), 1.0))
    if any(pack.routing is None or bool((pack.routing < 0).any()) for pack in plan.packs):
        return "routes are missing"
    differences = (torch.tensor(trainer.logprobs(pack, 1.0)) - pack.sampled for pack in plan.packs)
    return f"{max(float(found.abs().max()) for found in differences):.0e}"


def _prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(3, VOCABULARY - 1, (length,), generator=generator).tolist())


@torch.no_grad()
def _difference(model: torch.nn.Module, prompt: tuple[int, ...], told: list[tuple[int, float]]) -> float:
    """Largest difference of log-probs; infinite if a token is not the greedy one."""
    tokens = [token for token, _ in told]
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    wanted = logits[len(prompt) - 1 : -1].float().log_softmax(-1).max(-1)
    logprobs = torch.tensor([logprob for _, logprob in told])
    worst = float((wanted.values - logprobs).abs().max())
    return worst if wanted.indices.tolist() == tokens or worst > TOLERANCE else float("inf")


def _trained(model: torch.nn.Module, directory: Path) -> dict[str, Any]:
    """The fields of `Tried` that the trainer fills."""
    batch = Batch(0, tuple(_groups(model)), 1.0)
    try:
        trainer = TorchTrainer(directory, TrainConfig(dtype="float32", device="cpu"), AlgoConfig(), seed=0)
        (plan,) = trainer._plans(batch)
        trainer._gradient(1.0).fill(plan)
    except Late:
        raise
    except ConfigError:
        return {"trained": "refused"}
    except Exception as error:
        return {"trained": _words(error)}
    wanted, found = (dict(_gradients(some)) for some in (model, trainer._model))
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    zeros = {name: torch.zeros_like(gradient) for name, gradient in {**found, **wanted}.items()}
    differences = torch.stack(
        [(wanted.get(name, zero) - found.get(name, zero)).abs().max() for name, zero in zeros.items()]
    )
    return {"trained": trainer._forward.path, "gradient": float(differences.max()) / largest}


def _groups(model: torch.nn.Module) -> Iterator[Group]:
    """Groups with the model's own log-probs, so that PPO's gradient is that of -advantage × log-prob, a mean over all tokens. Leaves that gradient
    in the model, row by row and without padding."""
    count = sum(sum(completions) for _, completions in GROUPS)
    for ticket, (length, completions) in enumerate(GROUPS):
        prompt = _prompt(length)
        rows = []
        for k, size in enumerate(completions):
            tokens = _prompt(100 + size)[:size]
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
            logprobs = logits[length - 1 : -1].float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            advantage = (-1.0) ** k * (1 + k)
            (-advantage * logprobs.sum() / count).backward()
            known = tuple(logprobs.tolist())
            rows.append(Row(prompt, tokens, known, (advantage,) * size, (True,) * size, (0,) * size))
        yield Group(ticket, Prompt(str(ticket), "", prompt), (), tuple(rows))


def _gradients(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None)


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return _cell(f"{type(error).__name__}: {lines[-1].strip()}")


def _reason(sentence: str) -> str:
    return _cell(sentence.split("native engine: ")[-1].removesuffix("; choose another model"))


def _cell(text: str) -> str:
    """The first line, as far as it is a cell."""
    line = text.splitlines()[0]
    return line if len(line) <= 160 else line[:159].rstrip() + "…"


def page(rows: list[Tried]) -> str:
    counts = Counter(row.outcome for row in rows)
    tiers = Counter(_tier(row) for row in rows if row.outcome == "served")
    lines = [
        "# Models",
        "",
        f"How does the native engine serve each architecture that transformers ({transformers.__version__}) calls a causal language model? `make models` tries a small model of each, with",
        f"the layers of its default config, in float32: {len(PROMPTS)} texts, four of them together. Each greedy token must be the best one of",
        f"transformers' own forward pass, with a log-prob within {TOLERANCE:g} ({RECURRENT_TOLERANCE:g} with its own cache, which sums in another order).",
        "",
        f"{counts['served']} of {len(rows)} are served: "
        + ", ".join(f"{count} by `{tier}`" for tier, count in tiers.items())
        + f". {counts['refused']} are refused, {counts['differs']} differ and are not to be used, and of {counts['not tried']} no small model could be made.",
        "",
        f"{sum(_learns(row) for row in rows)} of {len(rows)} train: the gradient of a step equals that of plain autograd over single rows, to {GRADIENT_TOLERANCE:g} of the largest gradient in float32.",
        "The trainer forwards packed trees where attention allows it, shared tokens once and every branch from their state (carried states) where layers take a state,",
        "and otherwise row by row.",
        "",
        "| how | speed |",
        "|---|---|",
        *(f"| {tier} | {speed} |" for tier, speed in SPEEDS.items()),
        "",
        "[How quick each is beside `generate`](benchmarks.md#ways-of-serving). `headrace train --dry-run` and `headrace plan` name a model's way. LoRA adapters are served beside all of them, those of experts only beside `kernels` and `fused`;",
        'where transformers computes, each adapter has its own pass, and `lora.publish = "auto"` publishes it merged. A model\'s own cache gives no exact results: the sequences that share a pass decide the last places of its log-probs (up to 3e-6). What is not served is refused at the start.',
        "",
        f"{sum(row.replayed not in ('', 'refused') for row in rows)} of {sum(bool(row.replayed) for row in rows)} mixtures are trained with the experts that the engine chose (`rollout.keep_routing`). Auxiliary losses of a config (balance of experts, z-loss)",
        "are not part of a step, and the biases that choose experts stay as they were saved. Heads that predict further tokens are neither loaded nor trained; an exported model has them unchanged.",
        "",
        "With its own cache, forks and siblings begin from a copy where a state can be cut (attention without windows). Recurrent states and windows are kept at the ends of prompts and recomputed elsewhere",
        "(`recomputed_tokens`), as the kernels do it with [recurrences](decisions/0076-states-in-slots.md). Sequences that go on by one token run together ([how](decisions/0040-joined-caches.md)); conversations, and everything that `own cache alone` serves, one by one.",
        "",
        f"Log-probs, gradients and replayed log-probs differ by at most {SHOWN:g}, unless a larger figure stands behind the name.",
        "",
        "| how | trained | experts | model types |",
        "|---|---|---|---|",
        *_served_lines(rows),
        "",
        "| outcome | why | model types |",
        "|---|---|---|",
        *_other_lines(rows),
        "",
    ]
    return "\n".join(lines)


def _tier(row: Tried) -> str:
    return next((tier for tier in SPEEDS if row.path.startswith(tier)), row.path)


def _served_lines(rows: list[Tried]) -> Iterator[str]:
    """Lines of the table of served models: those of one way together."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.outcome == "served":
            groups.setdefault((_tier(row), row.trained, _experts(row)), []).append(_named(row))
    for way, names in sorted(groups.items(), key=lambda item: (list(SPEEDS).index(item[0][0]), -len(item[1]))):
        yield f"| {' | '.join(way)} | {', '.join(names)} |"


def _other_lines(rows: list[Tried]) -> Iterator[str]:
    """Lines of the table of models that are not served: those of one reason together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.outcome != "served":
            groups.setdefault((row.outcome, row.reason.replace("|", "/")), []).append(_named(row))
    for (outcome, why), names in sorted(groups.items(), key=lambda item: (item[0][0] != "refused", -len(item[1]))):
        yield f"| {outcome} | {why} | {', '.join(names)} |"


def _experts(row: Tried) -> str:
    """Returns what replaying the engine's experts in the trainer came to."""
    return "replayed" if re.fullmatch(r"\de[+-]\d\d", row.replayed) else row.replayed


def _named(row: Tried) -> str:
    """Returns the model type, with the figures that are larger than the rest, and how it is trained where it is not served."""
    replayed = float(row.replayed) if _experts(row) == "replayed" else 0.0
    figures = {"log-prob": row.difference, "gradient": row.gradient, "replayed": replayed}
    larger = [f"{name} {value:.0e}" for name, value in figures.items() if float(f"{value:.0e}") > SHOWN]
    trained = [f"trained {row.trained}"] if row.outcome != "served" and _learns(row) else []
    return f"{row.model_type} ({', '.join((*trained, *larger))})" if (*trained, *larger) else row.model_type


def _learns(row: Tried) -> bool:
    return row.gradient <= GRADIENT_TOLERANCE  # not where it is not a number


def main(types: tuple[str, ...]) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    for model_type in types or TYPES:
        try:
            row = tried(model_type)
        except Late as error:
            row = Tried(model_type, "not tried", reason=str(error))
        rows.append(row)
        sys.stderr.write(f"{row}\n")
    if not types:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tuple(sys.argv[1:]))
