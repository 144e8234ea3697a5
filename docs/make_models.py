"""Writes docs/models.md, the matrix of all architectures that transformers calls causal: `make models`.

A small model of each (`headrace/testing/small_models.py`) is saved, served by the native engine, and compared with transformers' own forward pass.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from headrace.core.errors import ConfigError
from headrace.core.types import Request, Sampling
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.runners.skeleton import unservable
from headrace.engine.native.served_how import SPEEDS
from headrace.models.saved_buffers import saved_buffers
from headrace.testing.makers import update
from headrace.testing.small_models import TYPES, VOCABULARY, small_config, small_model

PAGE = Path(__file__).parent / "models.md"
TOLERANCE = 1e-5
"""Largest difference of log-probs in float32."""
RECURRENT_TOLERANCE = 5e-5
"""Of models that compute a prompt and a token in two ways, with sums in another order."""
SECONDS = 30
PROMPTS = (9, 40)


@dataclass(frozen=True)
class Row:
    model_type: str
    outcome: str
    """`served`, `refused`, `differs`, or `not tried`."""
    path: str = ""
    difference: float = 0.0
    """Largest |Δ log-prob| of the sampled tokens."""
    reason: str = ""


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


def tried(model_type: str) -> Row:
    """One row of the matrix."""
    with tempfile.TemporaryDirectory() as name, limit(SECONDS):
        directory = Path(name) / model_type
        try:
            if reason := unservable(small_config(model_type)):
                return Row(model_type, "refused", reason=reason)
            model = small_model(model_type)
            model.save_pretrained(directory)
            _difference(model, _prompt(8), [(0, 0.0)])  # can transformers run it?
        except Exception as error:
            return Row(model_type, "not tried", reason=_words(error))
        try:
            return _compared(model_type, model, directory)
        except ConfigError as error:
            return Row(model_type, "refused", reason=_reason(str(error)))
        except Exception as error:
            return Row(model_type, "differs", reason=_words(error))


def _compared(model_type: str, model: torch.nn.Module, directory: Path) -> Row:
    settings = EngineConfig(
        dtype="float32", device="cpu", kv_gib=0.02, max_running=4, context_length=80, prefill_chunk=16
    )
    engine = NativeEngine(directory, settings)
    tensors = (*model.named_parameters(), *saved_buffers(model).items())
    engine.swap(engine.prepare(update(0), {name: tensor.detach() for name, tensor in tensors}))
    told: dict[str, list[tuple[int, float]]] = {}
    prompts = {str(length): _prompt(length) for length in PROMPTS}
    for request_id, prompt in prompts.items():
        engine.add(Request(request_id, prompt, Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)))
    while engine.has_work():
        output = engine.step()
        for finished in output.finished:
            if finished.stop == "error":
                return Row(model_type, "differs", engine.capabilities.path, reason=finished.error)
        for request_id, token, logprob in zip(output.request_ids, output.tokens, output.logprobs, strict=True):
            told.setdefault(request_id, []).append((token, logprob))
    path = engine.capabilities.path
    worst = max(_difference(model, prompt, told[request_id]) for request_id, prompt in prompts.items())
    served = worst <= (RECURRENT_TOLERANCE if path.startswith("own cache") else TOLERANCE)
    return Row(model_type, "served" if served else "differs", path, worst)


def _prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, VOCABULARY - 1, (length,), generator=torch.Generator().manual_seed(length)).tolist())


@torch.no_grad()
def _difference(model: torch.nn.Module, prompt: tuple[int, ...], told: list[tuple[int, float]]) -> float:
    """Largest difference of log-probs; infinite if a token is not the greedy one."""
    tokens = [token for token, _ in told]
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    wanted = logits[len(prompt) - 1 : -1].float().log_softmax(-1).max(-1)
    logprobs = torch.tensor([logprob for _, logprob in told])
    worst = float((wanted.values - logprobs).abs().max())
    return worst if wanted.indices.tolist() == tokens or worst > TOLERANCE else float("inf")


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return _cell(f"{type(error).__name__}: {lines[-1].strip()}")


def _reason(sentence: str) -> str:
    return _cell(sentence.split("native engine: ")[-1].removesuffix("; choose another model"))


def _cell(text: str) -> str:
    """The first line, as far as it is a cell."""
    line = text.splitlines()[0]
    return line if len(line) <= 160 else line[:159].rstrip() + "…"


def page(rows: list[Row]) -> str:
    counts = Counter(row.outcome for row in rows)
    tiers = Counter(_tier(row) for row in rows if row.outcome == "served")
    lines = [
        "# Models",
        "",
        "Every architecture that transformers calls a causal language model, and how the native engine serves it. `make models` writes this page",
        f"(transformers {transformers.__version__}). A small model of each, with groups of key heads, windows, biases, experts and several kinds of layers as in",
        "its default config, samples greedily in float32, its prompt in parts; each token must be the one that transformers' own forward pass",
        f"finds best, with a log-prob that differs by at most {TOLERANCE:g} ({RECURRENT_TOLERANCE:g} with its own cache, where prompts and tokens are summed in another order).",
        "",
        f"{counts['served']} of {len(rows)} are served: "
        + ", ".join(f"{count} by `{tier}`" for tier, count in tiers.items())
        + f". {counts['refused']} are refused, {counts['differs']} differ and are not to be used, and of {counts['not tried']} no small model could be made.",
        "",
        "| how | speed |",
        "|---|---|",
        *(f"| {tier} | {speed} |" for tier, speed in SPEEDS.items()),
        "",
        "`headrace train --dry-run` and `headrace plan` name the way of a model before it is loaded. Only the kernels and the fused decoder serve LoRA adapters, record experts,",
        'and are exact; with the others `lora.publish = "merged"` works, and the rest is refused at the start.',
        "",
        "With its own cache, a model's keys, values and states are those that transformers keeps. Where a state can be cut (attention without windows), forks and",
        "siblings begin from a copy. Recurrent states and windows cannot: they are kept at the ends of prompts and computed again elsewhere, which `recomputed_tokens`",
        "counts, and `kv_version` names the weights that did it. Sparse attention (`index_topk`) is compared over texts that it sees whole.",
        "",
        "| model type | outcome | how | largest Δ log-prob | why |",
        "|---|---|---|---|---|",
        *(_line(row) for row in rows),
        "",
    ]
    return "\n".join(lines)


def _tier(row: Row) -> str:
    return next((tier for tier in SPEEDS if row.path.startswith(tier)), row.path)


def _line(row: Row) -> str:
    difference = "" if row.outcome in ("refused", "not tried") else f"{row.difference:.0e}"
    return f"| {row.model_type} | {row.outcome} | {_tier(row)} | {difference} | {row.reason.replace('|', '/')} |"


def main(types: tuple[str, ...]) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    for model_type in types or TYPES:
        try:
            row = tried(model_type)
        except Late as error:
            row = Row(model_type, "not tried", reason=str(error))
        rows.append(row)
        sys.stderr.write(f"{_line(row)}\n")
    if not types:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tuple(sys.argv[1:]))
