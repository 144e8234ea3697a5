"""The parts of an engine, made from a model's directory: the forward pass, the tokenizer, the end-of-sequence tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.native.forward_pass import BLOCK, Runner
from headrace.engine.native.guides import Decode
from headrace.engine.native.runners import skeleton
from headrace.engine.native.sequences import Moves, SeesAhead
from headrace.engine.sizes import STATES_A_ROW, Cost, Demand, Sizes, cost, fitting, longest, usable
from headrace.models.image_axes import has_axes, moved_up
from headrace.models.image_blocks import ahead_in, ahead_of
from headrace.models.tokenizer import decoder_of, endings_of, load_tokenizer
from headrace.native.memory import own_pages

log = logging.getLogger(__name__)

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ServableModel:
    """A model that can be served, without its weights."""

    runner: Runner
    context_length: int
    vocabulary: int
    images: int = 0
    """Numbers of prompt tokens beyond the vocabulary, which stand for features of images."""
    moves: Moves | None = None
    """None for a model whose places are positions."""
    ahead: SeesAhead | None = None
    """None for a model whose tokens see back alone."""
    ends: frozenset[int]
    """Every end-of-sequence token."""
    decode: Decode | None
    """Tokens to text; None without a tokenizer."""
    tokenizer: Any = None
    """The tokenizer of transformers; None without one."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of every parameter, by name."""
    kept: frozenset[str] = frozenset()
    """Names of tensors that are served in the dtype in which they are published."""
    dtype: torch.dtype
    device: torch.device
    sizes: Sizes | None = None
    """The sizes that follow from the device; None: those of the settings."""

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Raises ValueError naming the first parameter that is missing, unknown, or of another shape or dtype."""
        skeleton.check(self.shapes, tensors, self.dtype, self.kept)
        here = skeleton.on_device(tensors, self.device)
        if self.runner.keeps:
            own_pages(here.values())
        return self.runner.prepare(here)


def read_model(model_dir: Path, config: EngineConfig, asleep: bool = False) -> ServableModel:
    """`asleep`: it is to begin without memory of its device. Raises ConfigError for a model that cannot be served."""
    from headrace.engine.native.runners.decoder import FusedRunner

    device, dtype = find_device(config.device), getattr(torch, config.serving_dtype)
    model, tokenizer = skeleton.read(model_dir, dtype, device), _tokenizer(model_dir)
    context = min(config.context_length, model.context_length or config.context_length)
    model = replace(model, context_length=context)
    runner = _runner(model, config, context, dtype, device)
    sizes = _sizes(model, runner, config, context, asleep=asleep)
    if isinstance(runner, FusedRunner):
        runner.expect(sizes.max_running, sizes.max_running + sizes.prefill_chunk)
    return ServableModel(
        runner=runner,
        context_length=context,
        vocabulary=model.vocabulary,
        images=model.images,
        moves=partial(_moves, model.model) if has_axes(model.model) else None,
        ahead=partial(_ahead, model.model) if ahead_in(model.model) else None,
        ends=endings_of(model_dir, tokenizer).all,
        decode=decoder_of(tokenizer) if tokenizer else None,  # with special tokens, so that they can be stop strings
        tokenizer=tokenizer,
        shapes=model.shapes,
        kept=model.kept,
        dtype=dtype,
        device=device,
        sizes=sizes,
    )


def _moves(model: Any, tokens: np.ndarray) -> np.ndarray:
    moved: np.ndarray = moved_up(model, torch.from_numpy(tokens.astype(np.int64))).numpy()
    return moved


def _ahead(model: Any, tokens: np.ndarray) -> np.ndarray:
    found: np.ndarray = ahead_of(model, torch.from_numpy(tokens.astype(np.int64))).numpy()
    return found


def _sizes(model: skeleton.Skeleton, runner: Runner, config: EngineConfig, context: int, *, asleep: bool) -> Sizes:
    """Returns the sizes of an engine. On a GPU what settings leave open follows from the memory that is free now; for one that begins
    `asleep`, from all memory, because it takes turns with what is there. Raises ConfigError if there is no room for one sequence."""
    asked, device = config.open_sizes, find_device(config.device)
    if device.type == "cpu" or None not in asked:
        return config.sizes
    size = torch.empty(0, dtype=getattr(torch, config.serving_dtype)).itemsize
    weights = sum(map(math.prod, model.shapes.values())) * size
    one = _cost(model, runner, size)
    free, total = torch.cuda.mem_get_info(device)
    room = usable(total if asleep else free, total, 1) - 2 * weights  # new ones lie beside those that are served
    sizes = fitting(asked, room, one, Demand(context, context / 2))
    if asked.kv_gib is None and longest(sizes, one) < context:
        shorter = f", or set engine.context_length = {found}" if (found := longest(sizes, one)) else ""
        raise ConfigError(
            f"{free / GIB:.3g} GiB of the GPU are free, of which {sizes.kv_gib:g} are left for the KV cache beside two copies of the weights: not "
            f"one sequence of engine.context_length = {context}, which takes {one.sequence(context) / GIB:.3g} GiB for this model. End what "
            f"else uses the GPU{shorter}"
        )
    log.info("by what is free of the GPU (%.3g of %.3g GiB): %s", free / GIB, total / GIB, sizes)
    return sizes


def _cost(model: skeleton.Skeleton, runner: Runner, size: int) -> Cost:
    """`size`: bytes of a number in the serving dtype."""
    matrices = [shape for shape in model.shapes.values() if len(shape) > 1]
    hidden = next((shape[-1] for shape in matrices if model.vocabulary in shape), 0)
    inner = max((max(shape[-2:]) for shape in matrices if model.vocabulary not in shape), default=hidden)
    return cost(runner.block_nbytes / BLOCK, hidden, inner, model.vocabulary, size)


def find_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError('engine.device = "cuda", but torch finds no GPU; use "auto" or "cpu"')
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu")


def _runner(
    model: skeleton.Skeleton, config: EngineConfig, context: int, dtype: torch.dtype, device: torch.device
) -> Runner:
    from headrace.engine.native.kernels.runner import INT8_LEVELS, KernelRunner
    from headrace.engine.native.runners import fp8
    from headrace.engine.native.runners.decoder import FusedRunner
    from headrace.engine.native.runners.hugging_face import HuggingFaceRunner
    from headrace.engine.native.runners.own_cache import OwnCacheRunner

    runners = {"kernels": KernelRunner, "fused": FusedRunner, "hf": HuggingFaceRunner, "cache": OwnCacheRunner}
    chosen = choose_path(model, config, dtype, device)
    quantised: dict[str, dict[str, Any]] = {"published": {}, "int8": {"levels": INT8_LEVELS}}
    if config.weights == "fp8":
        quantised["fp8"] = {"fp8": fp8.fp8_of(device)}
    return runners[chosen](
        model,
        context,
        dtype=dtype,
        device=device,
        exact=config.exact,
        max_adapters=config.max_adapters,
        **quantised[config.weights],
    )


def choose_path(model: skeleton.Skeleton, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Returns the value of `engine.path` that serves this model here: the one that is set, or for `auto` the first of four. Raises
    ConfigError with the reason if the one that is set does not."""
    from headrace.engine.native.kernels import runner as kernels
    from headrace.engine.native.runners import decoder, families, fp8

    sees = "its prompts hold features of images, which this path does not read" if model.images else ""
    refusals: dict[str, Callable[[], str]] = {
        "kernels": lambda: sees or kernels.refusal(model, dtype, device),
        "fused": lambda: sees or decoder.refusal(model),
        "hf": lambda: model.objection,
        "cache": str,
    }
    if config.weights == "int8":
        if reason := refusals["kernels"]():
            raise ConfigError(
                f'engine.weights = "int8" is of the C++ kernels, which do not serve {model.model_type} here: {reason}; set '
                'engine.weights = "published"'
            )
        return "kernels"
    if config.weights == "fp8":
        if reason := fp8.device_refusal(device) or refusals["fused"]() or fp8.refusal(families.read_spec(model)):
            other = '"int8" or "published"' if device.type == "cpu" else '"published"'
            raise ConfigError(
                f'engine.weights = "fp8" does not serve {model.model_type} here: {reason}; set engine.weights = {other}'
            )
        return "fused"
    if config.path != "auto":
        if reason := refusals[config.path]():
            raise ConfigError(
                f'engine.path = "{config.path}" does not serve {model.model_type} here: {reason}; use "auto"'
            )
        return config.path
    if config.max_adapters and families.mixes(model) and not refusals["fused"]():
        return "fused"  # adapters of experts are served there only
    return next(path for path, refusal in refusals.items() if not refusal())


class CacheRoom(NamedTuple):
    """Numbers of blocks, states and sequences for which there is room in a KV cache."""

    blocks: int
    states: int
    """Slots of states; 0 for a model without."""
    rows: int
    """Sequences that may run at once."""


def room_in_cache(model: ServableModel, kv_gib: float, max_running: int) -> CacheRoom:
    """Raises ConfigError when not even one sequence fits. States take half of the cache at most, and fewer sequences run where that is not enough."""
    block, state, needed = model.runner.block_nbytes, model.runner.state_nbytes, -(-model.context_length // BLOCK)
    least, all_of_it = needed * block + STATES_A_ROW * state, int(kv_gib * GIB)
    if all_of_it < least:
        raise ConfigError(
            f"engine.kv_gib = {kv_gib} does not hold one sequence of engine.context_length = {model.context_length}, which "
            f"takes {least / GIB:.3g} GiB for this model; raise engine.kv_gib or lower engine.context_length"
        )
    if not state:
        return CacheRoom(all_of_it // block, 0, max_running)
    most = max(STATES_A_ROW, min(all_of_it // 2, all_of_it - needed * block) // state)
    rows = min(max_running, most // STATES_A_ROW)
    if rows < max_running:
        log.warning(
            "engine.max_running = %d is lowered to %d: each sequence has a state of %.3g MiB beside its keys and values, and engine.kv_gib = %g is for "
            "both; raise it for more",
            max_running,
            rows,
            state / 2**20,
            kv_gib,
        )
    states = STATES_A_ROW * rows
    return CacheRoom((all_of_it - states * state) // block, states, rows)


def _tokenizer(model_dir: Path) -> Any:
    """None if the model has none."""
    try:
        return load_tokenizer(model_dir)
    except ConfigError:
        return None
