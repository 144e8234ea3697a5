"""Times a piece of a model on a GPU with work of several sizes, in a process of its own (`python -m headrace.run.auto.gpu_probe`).

The request is read from standard input and the rates are written to standard output, both as JSON. By the clock, with the device waited for at both ends
of a call, the least of several rounds. A size for which the memory does not suffice ends its list.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.native.forward_pass import BLOCK, ForwardInput
from headrace.engine.native.model_loading import ServableModel, read_model
from headrace.engine.native.runners.paged import PagedRunner
from headrace.run.auto.gpu_rates import GpuRates, GpuRequest, enough
from headrace.run.auto.probe import PROMPT, Clock, packed_groups
from headrace.run.auto.slices import Slice, slice_of

PARAMETERS = 64_000_000
"""Fewest parameters of the piece: 128 MB in bfloat16, more than the second-level cache of a GPU."""
CONTEXT, TEXT, ANSWER = 480, 512, 186
"""Tokens in the cache of a sequence that decodes, of a prompt in a pass, and of a completion that is trained; all fewer where the model has fewer positions."""
SHARE = 0.5
"""The share of the free memory that the cache of the piece may take."""


def measure_gpu(request: GpuRequest, device: torch.device, backend: str = "inductor") -> GpuRates:
    """Returns rates scaled to the whole model. `device`: a GPU; tests give a CPU. `backend`: of torch.compile."""
    began = time.perf_counter()
    piece = slice_of(request.config, PARAMETERS)
    if piece is None:
        return GpuRates(problem="the model's config.json does not say how large its layers are")
    torch.manual_seed(0)
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headrace-auto-") as folder:
        directory = Path(folder)
        (directory / "config.json").write_bytes(msgspec.json.encode(piece.config))
        rows, passes = _engine(request, directory, device, piece, notes)
        eager, compiled = _trainer(request, directory, device, piece, notes, backend=backend)
    return GpuRates(
        rows=rows,
        passes=passes,
        microbatches=eager,
        compiled=compiled,
        notes=tuple(notes),
        seconds=time.perf_counter() - began,
    )


def _rates(
    sizes: Sequence[int], work: Callable[[int], tuple[int, Callable[[], Any]]], device: torch.device, scale: float
) -> dict[int, float]:
    """`work` returns what one call takes, in tokens, and the call. Ends with the first size for which there is no room."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    found = {}
    for size in sizes:
        try:
            tokens, call = work(size)
            found[size] = tokens / (Clock(now).time(call) * scale)
        except torch.OutOfMemoryError:
            break
    return found


# --- the engine --------------------------------------------------------------------------------------------------------


def _engine(
    request: GpuRequest, directory: Path, device: torch.device, piece: Slice, notes: list[str]
) -> tuple[dict[int, float], dict[int, float]]:
    if not request.rows:
        return {}, {}
    settings: dict[str, Any] = {"device": device.type, "dtype": request.dtype, "path": request.path}
    settings |= {"kv_gib": 1.0, "max_running": 1, "prefill_chunk": 1}  # no graphs of sizes that are not timed
    try:
        model = read_model(directory, EngineConfig(context_length=CONTEXT + BLOCK, **settings))
    except ConfigError as error:
        notes.append(f"the engine was not measured: {error}")
        return {}, {}
    if not isinstance(model.runner, PagedRunner):
        notes.append(
            f"the engine was not measured: the passes of {model.runner.path} follow from what sequences have before them"
        )
        return {}, {}
    context = min(CONTEXT, model.context_length - 1)
    text = min(TEXT, model.context_length)
    most = _blocks(
        model,
        device,
        -(-(context + 1) // BLOCK) * max(request.rows),
        -(-text // BLOCK) * -(-max(request.passes) // text),
    )
    model.runner.allocate(most)
    tensors = {name: torch.randn(shape, dtype=torch.float32).mul_(0.02) for name, shape in model.shapes.items()}
    model.runner.use(model.prepare({name: tensor.to(model.dtype) for name, tensor in tensors.items()}))

    def passing(lengths: Sequence[int], before: int) -> tuple[int, Callable[[], Any]]:
        batch = _batch(model, lengths, before)
        if int(batch.tables.max()) >= most:
            raise torch.OutOfMemoryError
        return len(batch.tokens), lambda: _forward(model, batch)

    rows = _rates(request.rows, lambda size: passing([1] * size, context), device, piece.scale)
    passes = _rates(request.passes, lambda size: passing(list(_texts(size, text)), 0), device, piece.scale)
    model.runner.free()
    return rows, passes


def _blocks(model: ServableModel, device: torch.device, *wanted: int) -> int:
    """Returns as many blocks as are wanted at most, and fit."""
    if device.type != "cuda":
        return max(wanted)
    return min(max(wanted), int(SHARE * torch.cuda.mem_get_info(device)[0]) // model.runner.block_nbytes)


def _texts(tokens: int, longest: int) -> Iterator[int]:
    """Yields the lengths of prompts of so many tokens together."""
    while tokens > 0:
        yield min(tokens, longest)
        tokens -= longest


def _batch(model: ServableModel, lengths: Sequence[int], before: int) -> ForwardInput:
    count, starts = len(lengths), np.concatenate([[0], np.cumsum(lengths)])
    blocks = -(-(before + max(lengths)) // BLOCK)
    return ForwardInput(
        tokens=np.arange(starts[-1], dtype=np.int64) % model.vocabulary,
        starts=starts.astype(np.int32),
        context=np.full(count, before, dtype=np.int32),
        tables=np.arange(count * blocks, dtype=np.int32).reshape(count, blocks),
        rows=(starts[1:] - 1).astype(np.int64),
        adapters=np.full(count, -1, dtype=np.int32),
    )


@torch.no_grad()
def _forward(model: ServableModel, batch: ForwardInput) -> Any:
    return model.runner.forward(batch)


# --- the trainer -------------------------------------------------------------------------------------------------------


def _trainer(
    request: GpuRequest, directory: Path, device: torch.device, piece: Slice, notes: list[str], *, backend: str
) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the rates of eager layers, and of compiled ones with the microbatch that is enough for those."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from headrace.trainer.forward.compiled import compiled
    from headrace.trainer.forward.forward import choose_forward
    from headrace.trainer.forward.lowered import step_copies
    from headrace.trainer.model.causal_lm import computed_in

    if not request.microbatches:
        return {}, {}
    config = AutoConfig.from_pretrained(directory)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(device)
    forward, dtype = choose_forward(model), getattr(torch, request.dtype)
    copies = step_copies(forward, dtype)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 4 * ANSWER

    def training(size: int) -> tuple[int, Callable[[], Any]]:
        pack = packed_groups(size, config.get_text_config().vocab_size, min(ANSWER, positions // (PROMPT + 1))).to(
            device
        )

        def step() -> None:
            with copies.used(), computed_in(dtype, device):
                forward.logprobs(pack, 1.0, dtype).logprob.sum().backward()

        return len(pack.tokens), step

    eager = _rates(request.microbatches, training, device, piece.scale)
    if not eager or not request.compile:
        return eager, {}
    model.zero_grad()  # the trial compares gradients
    found = compiled(forward, dtype, copies, backend)
    if found.why_not:
        notes.append(found.why_not)
        return eager, {}
    forward = found.forward
    return eager, _rates([enough(eager)], training, device, piece.scale)


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=GpuRequest)
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print; standard output is for the rates alone
        rates = measure_gpu(request, torch.device("cuda", 0))
    sys.stdout.buffer.write(msgspec.json.encode(rates))


if __name__ == "__main__":
    main()
