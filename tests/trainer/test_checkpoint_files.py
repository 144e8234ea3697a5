"""Parts of tensors in files: whatever was written in parts is read in whatever other parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.trainer.model.outline import cut
from headrace.trainer.placement.port import TensorPiece
from headrace.trainer.step.checkpoint_files import SavedTensors, part_file, write

Runs = list[tuple[int, int]]


def runs_of(places: list[int]) -> Runs:
    found: Runs = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return found


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, list[list[Runs]], list[Runs]]:
    """A tensor; who of up to 3 × 2 ranks holds what of it, each place of a dimension with one of them; and what is asked for."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    owners = [
        draw(st.lists(st.integers(0, 2 if dim == 0 else 1), min_size=n, max_size=n)) for dim, n in enumerate(shape)
    ]
    holders: list[list[Runs]] = [[]]
    for owner in owners:
        parts = [runs_of([i for i, who in enumerate(owner) if who == rank]) for rank in range(3)]
        holders = [[*held, part] for held in holders for part in parts if part]
    wanted = [runs_of(sorted(draw(st.sets(st.integers(0, n - 1))))) for n in shape]
    return tensor, holders, wanted


@given(tensors())
@settings(max_examples=60)
def test_parts_are_read_in_other_parts(tmp_path_factory: pytest.TempPathFactory, given: object) -> None:
    tensor, holders, wanted = given  # type: ignore[misc]
    directory = tmp_path_factory.mktemp("parts")
    paths = [directory / part_file("model", rank, len(holders)) for rank in range(len(holders))]
    for path, region in zip(paths, holders, strict=True):
        write(path, {"x": TensorPiece(cut(tensor, region), region, tensor.shape)})
    saved = SavedTensors(paths)
    assert torch.equal(saved.read("x"), tensor)
    assert torch.equal(saved.read("x", wanted), cut(tensor, wanted))


def test_a_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.tensor(3.0),
        "d": torch.randn(4, 6).T,
        "e": torch.arange(256, dtype=torch.uint8),
        "f": torch.empty(0, 3),
    }
    write(tmp_path / "model.safetensors", {name: TensorPiece(tensor) for name, tensor in tensors.items()})
    found, saved = load_file(tmp_path / "model.safetensors"), SavedTensors([tmp_path / "model.safetensors"])
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == saved.dtypes[name] == tensor.dtype
        assert torch.equal(saved.read(name), tensor) and saved.shapes[name] == tensor.shape


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    for rank in (0, 1):
        region = [[(2 * rank, 2 * rank + 2)]]
        write(tmp_path / part_file("model", rank, 2), {"x": TensorPiece(torch.ones(2), region, (4,))})
    paths = sorted(tmp_path.iterdir())
    assert torch.equal(SavedTensors(paths).read("x"), torch.ones(4))
    with pytest.raises(CheckpointError, match="have 2 of the 4 values of x; resume from an older"):
        SavedTensors(paths[:1])
    paths[1].write_bytes(paths[1].read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors cannot be read"):
        SavedTensors(paths)
