"""What vLLM's modules multiply by, with modules made as vLLM's are: their products use a copy that was packed when weights were loaded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.weight_sync.in_vllm.read_back import COLUMNS, borrowed, unlike

HIDDEN, VOCABULARY, PADDED = 24, 10, 16
LAYER = {"qkv_proj": [("q_proj", 24), ("k_proj", 8), ("v_proj", 8)], "o_proj": [("o_proj", 24)]}


class UnquantizedMethod:
    """Multiplies by what was packed, whatever is in `weight` since."""

    def apply(self, module: torch.nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return x @ module.packed.T  # type: ignore[union-attr, operator]


class Product(torch.nn.Module):
    def __init__(self, rows: int, emptied: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0 if emptied else rows, HIDDEN), requires_grad=False)
        self.packed, self.quant_method = torch.zeros(rows, HIDDEN), UnquantizedMethod()


class FakeHead(Product):
    num_embeddings = VOCABULARY


class Table(Product):
    num_embeddings = VOCABULARY


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN), requires_grad=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lm_head, self.norm = Table(PADDED, emptied=False), FakeHead(PADDED), Norm()
        self.layer = torch.nn.ModuleDict(
            {name: Product(sum(rows for _, rows in parts)) for name, parts in LAYER.items()}
        )

    def load(self, tensors: dict[str, Tensor], kept: str = "") -> None:
        """`kept`: the module whose copy is not made anew."""
        for name, module in self.named_modules():
            if name == kept:
                continue
            last = name.rpartition(".")[2]
            if isinstance(module, Norm):
                module.weight.data = tensors[f"{name}.weight"]
            elif isinstance(module, Product):
                parts = [f"layer.{part}.weight" for part, _ in LAYER[last]] if last in LAYER else [f"{name}.weight"]
                whole = torch.cat([tensors[part] for part in parts])
                padded = torch.cat([whole, torch.zeros(len(module.packed) - len(whole), HIDDEN)])
                module.packed = padded
                if name == "table":
                    module.weight.data = padded


def tensors_of(version: int) -> dict[str, Tensor]:
    """As after an optimizer step: all values of each column change a little."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"table": VOCABULARY, "lm_head": VOCABULARY}
    shapes |= {f"layer.{part}": rows for parts in LAYER.values() for part, rows in parts}
    found = {
        f"{name}.weight": torch.randn(rows, HIDDEN, generator=draw) + version * 1e-3 for name, rows in shapes.items()
    }
    return {**found, "norm.weight": torch.ones(HIDDEN) + version * 1e-3}


def test_what_was_loaded_is_what_is_multiplied_by() -> None:
    model = Model()
    for version in range(HIDDEN + 1):
        model.load(tensors_of(version))
        assert unlike(model, tensors_of(version), version) == ([], 5)


@pytest.mark.parametrize("kept", ["lm_head", "table", "norm", "layer.qkv_proj", "layer.o_proj"])
def test_a_module_that_keeps_an_old_copy_is_named_at_the_first_version(kept: str) -> None:
    model = Model()
    model.load(tensors_of(0))
    model.load(tensors_of(1), kept)
    assert unlike(model, tensors_of(1), 1)[0] == [f"{kept}.weight"]


def test_a_single_value_is_found_when_its_column_is_read() -> None:
    model, tensors = Model(), tensors_of(0)
    model.load(tensors)
    model.layer["o_proj"].packed[3, 5] += 1e-4  # type: ignore[index, operator, union-attr]
    found = [bool(unlike(model, tensors, version)[0]) for version in range(2 * HIDDEN)]
    assert sum(found) == 2 * COLUMNS, "each column is read every third version"


def test_shards_and_what_the_files_do_not_hold_are_not_read() -> None:
    model, tensors = Model(), tensors_of(0)
    model.load(tensors)
    model.layer["o_proj"].tp_size = 2  # type: ignore[assignment]
    del tensors["layer.k_proj.weight"]
    assert unlike(model, tensors, 0) == ([], 3)


def test_a_parameter_that_is_no_copy_is_named() -> None:
    """It would change with a version that is written to the same memory."""
    memory = torch.randn(64)
    given = {"table.weight": memory[:24], "norm.weight": memory[24:48]}
    model = Model()
    model.norm.weight.data.copy_(given["norm.weight"])
    assert borrowed(model, given) == []
    model.norm.weight.data = given["norm.weight"]
    model.register_buffer("scales", memory[60:])
    assert borrowed(model, given) == ["norm.weight", "scales"]
