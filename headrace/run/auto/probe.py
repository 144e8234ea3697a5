"""Times a piece of a model with every candidate, in a separate process (`python -m headrace.run.auto.probe`).

The request is read from standard input and the figures are written to standard output, both as JSON. Candidates are compared by the CPU
time of one thread, the least of several rounds: CPU time does not count the time that a pass waits on a busy machine.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.core.batches import Row
from headrace.core.errors import ConfigError
from headrace.core.types import Struct
from headrace.engine.config import EngineConfig
from headrace.engine.native.forward_pass import BLOCK, ForwardInput
from headrace.engine.native.model_loading import read_model
from headrace.run.auto.candidates import Candidate, Figures
from headrace.run.auto.slices import Slice, slice_of
from headrace.trainer.config import TrainConfig

ROWS, CONTEXT = 32, 40
"""Sequences that are decoded at once, and tokens in the cache of each."""
OPERATIONS = 12e9
"""Floating-point operations of one forward and backward pass of the trainer, which set its number of tokens."""
FEWEST, MOST = 22, 264
"""Bounds of that number of tokens."""
GROUP, PROMPT = 8, 3
"""Completions that share a prompt, and the length of the prompt in completions."""
ROUNDS, ENOUGH = 4, 0.1
"""Rounds of measurement per candidate, and CPU-seconds of a round."""
HOPELESS = 1.5
"""A candidate that takes this many times the best so far is not measured further."""


class ProbeRequest(Struct, frozen=True):
    """The measurements that a probe has to make."""

    config: dict[str, Any]
    """The model's `config.json`."""
    candidates: tuple[tuple[str, str, str], ...]
    """The fields of each `Candidate`."""
    threads: tuple[int, ...]
    """Numbers of threads to compare; a single one is not measured."""


class Clock:
    """Measures the least CPU time of a call. `best`: the least of all calls that were timed with this clock."""

    def __init__(self, now: Callable[[], float] = time.process_time) -> None:
        self._now, self.best = now, float("inf")

    def time(self, work: Callable[[], Any]) -> float:
        """Returns the seconds of one call, after a first one that is not counted."""
        work()
        least = float("inf")
        for _ in range(ROUNDS):
            began, calls = self._now(), 0
            while not calls or self._now() - began < ENOUGH:
                work()
                calls += 1
            least = min(least, (self._now() - began) / calls)
            if least > HOPELESS * self.best:
                break
        self.best = min(self.best, least)
        return least


def measure(request: ProbeRequest) -> Figures:
    """Returns figures scaled to the whole model. Candidates that this machine or this model does not support are left out."""
    began = time.perf_counter()
    piece = slice_of(request.config)
    if piece is None:
        return Figures(problem="the model's config.json does not say how large its layers are")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    wanted = [Candidate(part, dtype, path) for part, dtype, path in request.candidates]  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(prefix="headrace-auto-") as folder:
        directory = Path(folder)
        (directory / "config.json").write_bytes(msgspec.json.encode(piece.config))
        engines, passes = _engines(
            [candidate for candidate in wanted if candidate.part == "engine"], directory, piece.scale
        )
        trainers, update = _trainers(
            [candidate for candidate in wanted if candidate.part == "trainer"], directory, piece
        )
        threads = _threads(passes, request.threads, directory) if len(request.threads) > 1 else {}
    return Figures(engines | trainers, update, threads, ROWS, time.perf_counter() - began)


# --- the engine --------------------------------------------------------------------------------------------------------


def _engines(wanted: list[Candidate], directory: Path, scale: float) -> tuple[dict[str, float], Candidate | None]:
    """Returns tokens per CPU-second by candidate, and the fastest. Hugging Face's own forward is tried only if neither of ours serves
    the model, and its own cache only if that does not either."""
    clock, found = Clock(), dict[Candidate, float]()
    for candidate in wanted:
        if candidate.path in ("hf", "cache") and any(other.path != candidate.path for other in found):
            continue
        with contextlib.suppress(ConfigError):
            found[candidate] = clock.time(_engine_pass(candidate, directory)) * scale
    tokens = {candidate.name: ROWS / seconds for candidate, seconds in found.items()}
    return tokens, min(found, key=lambda candidate: found[candidate]) if found else None


def _engine_pass(candidate: Candidate, directory: Path) -> Callable[[], Any]:
    """Returns a function that runs one pass. Raises ConfigError if the candidate does not serve this model here."""
    settings: dict[str, Any] = {"dtype": candidate.dtype, "path": candidate.path}
    model = read_model(directory, EngineConfig(device="cpu", context_length=4 * BLOCK, **settings))
    tensors = {name: torch.randn(shape, dtype=torch.float32).mul_(0.02) for name, shape in model.shapes.items()}
    blocks = -(-(CONTEXT + 1) // BLOCK)
    model.runner.allocate(ROWS * blocks, states=ROWS if model.runner.state_nbytes else 0)
    model.runner.use(model.prepare({name: tensor.to(model.dtype) for name, tensor in tensors.items()}))
    batch = ForwardInput(
        tokens=np.arange(ROWS, dtype=np.int64) % model.vocabulary,
        starts=np.arange(ROWS + 1, dtype=np.int32),
        context=np.full(ROWS, CONTEXT, dtype=np.int32),
        tables=np.arange(ROWS * blocks, dtype=np.int32).reshape(ROWS, blocks),
        rows=np.arange(ROWS, dtype=np.int64),
        adapters=np.full(ROWS, -1, dtype=np.int32),
        states=np.arange(ROWS, dtype=np.int32),
    )

    def forward() -> Any:
        with torch.no_grad():
            return model.runner.forward(batch)

    return forward


def _threads(fastest: Candidate | None, counts: tuple[int, ...], directory: Path) -> dict[int, float]:
    """Returns wall-clock seconds of a pass by the number of threads: the least of several, because other processes may be running."""
    timed = {}
    for count in counts if fastest else ():
        assert fastest is not None
        torch.set_num_threads(count)
        timed[count] = Clock(time.perf_counter).time(_engine_pass(fastest, directory))
    return timed


# --- the trainer -------------------------------------------------------------------------------------------------------


def _trainers(wanted: list[Candidate], directory: Path, piece: Slice) -> tuple[dict[str, float], float]:
    """Returns tokens per CPU-second by candidate, and CPU-seconds of an update of the whole model."""
    if not wanted:
        return {}, 0.0
    clock, tokens, update = Clock(), {}, 0.0
    count = int(min(MOST, max(FEWEST, OPERATIONS * piece.scale / (6 * piece.parameters))))
    count -= count % (GROUP + PROMPT)
    for path in dict.fromkeys(candidate.path for candidate in wanted):
        for candidate, work, adamw in _trainer_passes(path, [c for c in wanted if c.path == path], directory, count):
            tokens[candidate.name] = count / (clock.time(work) * piece.scale)
            update = update or Clock().time(adamw) * piece.scale
    return tokens, update


def _trainer_passes(
    path: str, wanted: list[Candidate], directory: Path, count: int
) -> Iterator[tuple[Candidate, Callable[[], Any], Callable[[], Any]]]:
    """Yields for each dtype a forward and backward pass over `count` tokens, and an update. One model serves all dtypes of a path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from headrace.trainer.forward.forward import choose_forward
    from headrace.trainer.forward.fused_model import fuse
    from headrace.trainer.model.causal_lm import computed_in
    from headrace.trainer.placement.port import Single
    from headrace.trainer.step.learner import apply

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32).eval()
    forward = choose_forward(model)
    if path == "kernels" and not fuse(forward):
        return
    pack = packed_groups(count, model.get_input_embeddings().weight.shape[0])
    placement = Single()
    optimizer = placement.optimizer(model.named_parameters(), TrainConfig())
    for candidate in wanted:
        dtype = getattr(torch, candidate.dtype)

        def work(dtype: torch.dtype = dtype) -> None:
            with computed_in(dtype, model.device):
                forward.logprobs(pack, 1.0, dtype).logprob.sum().backward()

        def update() -> None:
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            apply(optimizer, placement, lr=0.0, max_norm=1.0)

        yield candidate, work, update


def packed_groups(count: int, vocabulary: int, longest: int | None = None) -> Any:
    """Packs prompts with `GROUP` completions each, about `count` tokens together; they share their prompt, as a group of a run does. `longest`: tokens of
    a completion at most; without it there is one group."""
    from headrace.trainer.packing import StepRows, pack_rows

    length = max(1, min(longest or count, count // (GROUP + PROMPT)))
    groups, zeros, rows = max(1, count // ((GROUP + PROMPT) * length)), (0.0,) * length, []
    for group in range(groups):
        tokens = [(group + place * 7919) % vocabulary for place in range((GROUP + PROMPT) * length)]
        rows += [
            Row(
                prompt=tuple(tokens[: PROMPT * length]),
                tokens=tuple(tokens[start : start + length]),
                logprobs=zeros,
                advantages=zeros,
                mask=(True,) * length,
                versions=(0,) * length,
            )
            for start in range(PROMPT * length, len(tokens), length)
        ]
    budget = groups * (GROUP + PROMPT) * length
    return pack_rows(StepRows(rows, lambda counts, _: [1.0] * len(counts), constant=0, budget=budget, step=0)).packs[0]


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeRequest)
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print; standard output is for the figures alone
        figures = measure(request)
    sys.stdout.buffer.write(msgspec.json.encode(figures))


if __name__ == "__main__":
    main()
