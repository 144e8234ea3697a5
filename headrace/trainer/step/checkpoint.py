"""The trainer's part of a checkpoint, bit for bit, without pickles:

    model.safetensors       trained parameters by name, tied ones once, and buffers that are part of the model; float32 (the masters,
                            where weights are offloaded), or bfloat16 where nothing more exact is kept. For an adapter it is
                            `adapter_model.safetensors`, beside peft's `adapter_config.json`
    optimizer.safetensors   exp_avg/<name>, exp_avg_sq/<name>, step/<name>, rng/cpu, rng/cuda:<i>; of a critic critic/weight, critic/bias and their
                            moments, critic/exp_avg/weight, ..., and those of its own model, critic/trunk.<name>, if it has one (a checkpoint without
                            them begins a critic anew); of a process reward process/<name>
                            and its moments; of a reference that moves reference/<name>
    trainer.json            format, version, seed; the entropy's factor and last mean; the divergence's factor; for an adapter, the fingerprint of the base it
                            belongs to; the ranks that wrote files, where several did

Ranks that hold parts of tensors write these parts, each into files of its own (`checkpoint_files.py`): `model-00001-of-00002.safetensors`. Ranks that read them, however many and
split in whatever way, and a process alone read what they hold. The learning rate is a function of the version, so a schedule has no state of its own. `rng/cpu` has the random states
of all ranks, one after another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.durable.atomic_files import sync_to_disk
from headrace.trainer.model.adapters import ADAPTER_MODEL
from headrace.trainer.model.low_memory import MixedAdamW
from headrace.trainer.placement.port import Keep, Placement, TensorPiece, on_host
from headrace.trainer.step import checkpoint_files
from headrace.trainer.step.checkpoint_files import SavedTensors, unreadable

if TYPE_CHECKING:
    from jaxtyping import UInt8


FORMAT, FORMAT_OF_PARTS = 1, 2
_BESIDE = ("rng/", "critic/", "process/", "reference/", "teacher/")
"""Beginnings of the names of what is no state of the policy's optimizer."""
MODEL, OPTIMIZER, TRAINER = "model.safetensors", "optimizer.safetensors", "trainer.json"


@dataclass(frozen=True)
class Contents:
    """The tensors that a checkpoint saves of a model. They are the live ones: read by a save and overwritten by a restore."""

    file: str
    weights: Mapping[str, Tensor]
    parameters: Mapping[str, torch.nn.Parameter]
    """The trained parameters, by the names under which their optimizer state is saved."""
    base: str = ""
    """Fingerprint of the frozen weights that they were trained with."""
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of a critic, a process reward or a reference that moves, and the mark of a teacher, which are no part of the model: they lie with the optimizer's
    state."""


def save(
    directory: Path,
    contents: Contents,
    optimizer: torch.optim.Optimizer,
    *,
    placement: Placement,
    version: int,
    seed: int,
) -> None:
    """Writes and flushes the files; the caller renames the directory. Raises OSError (disk full, say)."""
    capture(contents, optimizer, placement=placement, version=version, seed=seed)(directory)


def capture(
    contents: Contents,
    optimizer: torch.optim.Optimizer,
    *,
    placement: Placement,
    version: int,
    seed: int,
    entropy: tuple[float, float] = (0.0, math.nan),
    kl: float = 0.0,
    keep: Keep = on_host,
) -> Callable[[Path], None]:
    """Takes all that this rank writes of a checkpoint, and returns the rest of `save`, which needs no other rank. `keep`: makes copies, if the model is
    trained before they are written."""
    kept = [
        _kept(placement.pieces(tensors), keep)
        for tensors in (_trained(contents, optimizer), _moments(contents, optimizer))
    ]
    generators, rank = placement.each(torch.get_rng_state())
    counts, _ = placement.each(torch.tensor([len(kept[0]) + len(kept[1])]))
    writers = [number for number, (count,) in enumerate(counts.tolist()) if count or not number]
    if placement.leads:
        kept[1] |= {name: TensorPiece(state) for name, state in _rng(generators.flatten()).items()}
    facts = {
        "format": FORMAT,
        "version": version,
        "seed": seed,
        "base": contents.base,
        "entropy": list(entropy),
        "kl": kl,
    }
    if len(writers) > 1:
        facts |= {"format": FORMAT_OF_PARTS, "ranks": len(counts), "writers": writers}
    text = json.dumps(facts)
    files = [_file(name, rank, facts) for name in (contents.file, OPTIMIZER)]

    def write(directory: Path) -> None:
        if rank not in writers:
            return
        directory.mkdir(exist_ok=True)  # not its parents: a run that the user deleted must not reappear
        for name, pieces in zip(files, kept, strict=True):
            checkpoint_files.write(directory / name, pieces)
            sync_to_disk(directory / name)
        if placement.leads:
            (directory / TRAINER).write_text(text)
            sync_to_disk(directory / TRAINER)

    return write


def _kept(pieces: Mapping[str, TensorPiece], keep: Keep) -> dict[str, TensorPiece]:
    return {name: piece._replace(values=keep(name, piece.values)) for name, piece in pieces.items()}


def _file(name: str, rank: int, facts: Mapping[str, Any]) -> str:
    """The name of a file that a rank writes."""
    ranks = facts.get("ranks", 1)
    return name if ranks == 1 else checkpoint_files.part_file(name.removesuffix(".safetensors"), rank, ranks)


def saved_weights(directory: Path) -> SavedTensors:
    """The weights of a checkpoint, of a model or of an adapter. Raises CheckpointError if they cannot be read."""
    facts = _read_facts(directory)
    name = next((name for name in (MODEL, ADAPTER_MODEL) if (directory / _file(name, 0, facts)).exists()), MODEL)
    return _saved(directory, name, facts)


def _saved(directory: Path, name: str, facts: Mapping[str, Any]) -> SavedTensors:
    return SavedTensors([directory / _file(name, rank, facts) for rank in facts.get("writers", [0])])


def tensors(contents: Contents, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of a checkpoint where they lie, by the names under which they are kept."""
    return {**_trained(contents, optimizer), **_moments(contents, optimizer)}


def restore(directory: Path, contents: Contents, optimizer: torch.optim.Optimizer, placement: Placement) -> int:
    """Restores everything and returns the version. Raises CheckpointError before anything is changed."""
    trained, facts = _trained(contents, optimizer), _read_facts(directory)
    weights, rest = weights_of(directory, replace(contents, weights=trained)), _saved(directory, OPTIMIZER, facts)
    state = _optimizer_state(directory, rest, contents, optimizer=optimizer, placement=placement)
    with torch.no_grad():
        for name, tensor in trained.items():
            tensor.copy_(placement.part(partial(weights.read, name), like=tensor))
    if isinstance(optimizer, MixedAdamW):
        optimizer.show_masters()
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    _restore_rng(rest, placement)
    return int(facts["version"])


def weights_of(directory: Path, contents: Contents) -> SavedTensors:
    """The weights of a checkpoint. Raises CheckpointError if they are not those of the contents, by names, shapes and dtypes."""
    facts = _read_facts(directory)
    if (base := str(facts.get("base", ""))) != contents.base:
        problem = "it holds an adapter of other base weights" if base else "it holds all weights of a model, no adapter"
        raise _foreign(directory, problem if contents.base else "it holds an adapter, not all weights of a model")
    weights = _saved(directory, contents.file, facts)
    _check(directory / contents.file, weights, contents.weights)
    return weights


def entropy_of(directory: Path) -> tuple[float, float] | None:
    """Returns the factor that the entropy's bonus has come to, and the last mean (`objective.EntropyFactor`); None if the factor did not move, and in a
    checkpoint of an earlier version."""
    coef, mean = json.loads((directory / TRAINER).read_text()).get("entropy", (0.0, math.nan))
    return None if math.isnan(mean) else (float(coef), float(mean))


def kl_of(directory: Path) -> float:
    """Returns the factor that the divergence in the loss has come to (`objective.KLFactor`); 0 if it did not move, and in a checkpoint of an earlier version."""
    return float(json.loads((directory / TRAINER).read_text()).get("kl", 0.0))


def beside_of(directory: Path) -> SavedTensors:
    """Returns the file in which the tensors beside the model lie, among others. Raises CheckpointError."""
    return _saved(directory, OPTIMIZER, _read_facts(directory))


def all_weights(model: Any) -> Contents:
    """Parameters in canonical order, tied ones once, then the buffers that `state_dict` would save."""
    parameters, saved = dict(model.named_parameters()), model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return Contents(MODEL, {name: p.detach() for name, p in parameters.items()} | buffers, parameters)


def _trained(contents: Contents, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The weights, with masters in the place of those that are offloaded."""
    masters = optimizer.masters if isinstance(optimizer, MixedAdamW) else {}
    if not masters:
        return dict(contents.weights)
    by_memory = {p.data_ptr(): masters[p] for p in contents.parameters.values() if p in masters}
    return {name: by_memory.get(tensor.data_ptr(), tensor) for name, tensor in contents.weights.items()}


def _moments(contents: Contents, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state by parameter name, and what is kept beside. A parameter that never had a gradient has no state."""
    return {
        f"{key}/{name}": tensor
        for name, parameter in contents.parameters.items()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    } | dict(contents.beside)


def _optimizer_state(
    directory: Path,
    rest: SavedTensors,
    contents: Contents,
    *,
    optimizer: torch.optim.Optimizer,
    placement: Placement,
) -> dict[int, dict[str, Tensor]]:
    """The state in torch's form: by the parameter's number in the groups."""
    names = {parameter: name for name, parameter in contents.parameters.items()}
    ordered = [(names[p], p) for group in optimizer.param_groups for p in group["params"]]
    known = {f"{key}/{name}" for name, _ in ordered for key in ("exp_avg", "exp_avg_sq", "step")}
    state: dict[int, dict[str, Tensor]] = {}
    for number, (name, parameter) in enumerate(ordered):
        found = [key for key in ("exp_avg", "exp_avg_sq", "step") if f"{key}/{name}" in rest]
        shapes = [rest.shapes[f"{key}/{name}"] for key in found if key != "step"]
        if found and (len(found) != 3 or shapes != [parameter.shape] * 2):
            raise _foreign(directory, f"the optimizer state of {name} does not fit")
        if found:  # `step` is a scalar, and every rank has it
            moments = {key: placement.part(partial(rest.read, f"{key}/{name}"), like=parameter) for key in found[:2]}
            state[number] = {**moments, "step": rest.read(f"step/{name}")}
    strangers = [name for name in rest if name not in known and not name.startswith(_BESIDE)]
    if strangers:
        raise _foreign(directory, f"{OPTIMIZER} holds {strangers[0]}, which the model does not have")
    return state


def _check(file: Path, found: SavedTensors, expected: Mapping[str, Tensor]) -> None:
    missing = [name for name in expected if name not in found]
    strangers = [name for name in found if name not in expected]
    if missing or strangers:
        problem = f"lacks {missing[0]}" if missing else f"holds {strangers[0]}, which the model does not have"
        raise _foreign(file.parent, f"{file.name} {problem}")
    for name, tensor in expected.items():
        if found.shapes[name] != tensor.shape:
            shapes = f"{list(found.shapes[name])} instead of {list(tensor.shape)}"
            raise _foreign(file.parent, f"{name} has shape {shapes}")
        if found.dtypes[name] != tensor.dtype:
            written = str(found.dtypes[name]).removeprefix("torch.")
            raise CheckpointError(
                f"checkpoint {file.parent.name} holds {name} in {written}, and train.weights or train.offload_optimizer ask "
                "for another dtype; resume with the settings it was written with"
            )


def _foreign(directory: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {directory.name}: {problem}; it belongs to another model: resume with the model it was written for"
    )


def _rng(cpu: UInt8[Tensor, "*state"]) -> dict[str, Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"rng/cpu": cpu, **{f"rng/cuda:{i}": state for i, state in enumerate(cuda)}}


def _restore_rng(rest: SavedTensors, placement: Placement) -> None:
    """Every rank goes on with its own random numbers, or with those of rank 0 where there were other ranks."""
    if "rng/cpu" in rest:
        now, mine = placement.each(torch.get_rng_state())
        saved = rest.read("rng/cpu").view(-1, now.shape[1])
        torch.set_rng_state(saved[mine if len(saved) == len(now) else 0].clone())
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"rng/cuda:{i}" in rest:
            torch.cuda.set_rng_state(rest.read(f"rng/cuda:{i}"), i)


def _read_facts(directory: Path) -> dict[str, Any]:
    path = directory / TRAINER
    try:
        facts = json.loads(path.read_text())
        form = facts["format"]
        int(facts["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unreadable(path, error) from error
    if form not in (FORMAT, FORMAT_OF_PARTS):
        raise CheckpointError(
            f"checkpoint {directory.name} has format {form}; this version of headrace reads {FORMAT} and {FORMAT_OF_PARTS}"
        )
    return dict(facts)
