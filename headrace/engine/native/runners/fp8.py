"""Linear layers in FP8 (e4m3, Micikevicius et al., arXiv:2209.05433): a code for each weight, with a scale for each output, made once a version,
and codes of the activations, with a scale for each row, made for every product.

What a GPU multiplies is a pair of codes, and the two scales come once, behind the sum in float32. `EMULATED` computes the same from the same
codes on any device, so that the numbers can be tested without a GPU. On a GPU the products are tried against it before they are trusted.

`torch._scaled_mm` takes scales of rows and outputs since compute capability 8.9 (torch 2.11 to 2.13, RowwiseScaledMM.cu), makes bfloat16 of them,
and wants widths that are multiples of 16. `torch._scaled_grouped_mm`, for all experts of a mixture at once, is there for 9.0 and 10.0 alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from headrace.engine.native.runners.layers import Matrix, Stack
from headrace.engine.native.runners.paged import EXACT_ROWS, in_pieces
from headrace.engine.native.runners.weight_places import Linear, Spec, expert_shapes, linear_shapes

log = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number that e4m3 has."""
LEAST = 2.0**-100
"""The smallest scale: a row of zeros has codes of zero, and no device takes its scale for zero."""
WIDTHS = 16
"""Inputs and outputs of a product are multiples of this."""

Coded = tuple[torch.Tensor, torch.Tensor]
"""Codes [n, k] in e4m3 and a scale [n, 1] float32 for each row."""


@dataclass(frozen=True)
class Fp8:
    """Operations of a device."""

    rows: Callable[[torch.Tensor], Coded]
    """x [n, k] in any dtype -> its codes."""
    product: Callable[[Coded, Coded, torch.Tensor | None, torch.dtype], torch.Tensor]
    """(rows [n, k], weights [m, k], bias [m], dtype) -> [n, m]"""
    grouped: Callable[[Coded, Coded, torch.Tensor, torch.dtype], torch.Tensor] | None = None
    """(rows [n, k], weights [E, m, k], where the rows of each expert end [E] int32, dtype) -> [n, m]; None where there is none."""


def coded(x: torch.Tensor) -> Coded:
    """Codes of the rows, rounded to nearest even. A row with a number that is not finite has none that is."""
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=LEAST)
    return (wide / scales).to(E4M3), scales


def emulated_product(x: Coded, weight: Coded, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Products of codes are exact in float32, so that only the order of the sum can differ from a GPU's."""
    out = (x[0].float() @ weight[0].float().T) * x[1] * weight[1].T
    return (out if bias is None else out + bias.float()).to(dtype)


def scaled_product(x: Coded, weight: Coded, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Sums are kept in float32 (`use_fast_accum`): with the 14 bits of Hopper's tensor cores they would be off by as much as the codes are."""
    product: torch.Tensor = torch._scaled_mm(
        x[0], weight[0].t(), x[1], weight[1].t(), bias=bias, out_dtype=dtype, use_fast_accum=False
    )
    return product


def grouped_product(x: Coded, weights: Coded, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    product: torch.Tensor = torch._scaled_grouped_mm(
        x[0], weights[0].mT, x[1][:, 0], weights[1][..., 0], offs=ends, out_dtype=dtype, use_fast_accum=False
    )
    return product


EMULATED = Fp8(coded, emulated_product)


class Fp8Matrix(Matrix):
    """x [n, in] -> [n, out] in the dtype of x."""

    def __init__(self, weights: Linear, by: Fp8) -> None:
        weight, self.bias = weights
        codes, self.scales = coded(weight)
        self.codes = codes.view(torch.uint8)  # as bytes, because not every operation on lists of tensors knows e4m3
        self._by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._by.product(self._by.rows(x), (self.codes.view(E4M3), self.scales), self.bias, x.dtype)


class Fp8Stack(Stack):
    """Matrices [E, out, in] of all experts."""

    def __init__(self, weight: torch.Tensor, by: Fp8, exact: bool) -> None:
        self._by, self._exact = by, exact
        self.codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        self.scales = torch.empty((*weight.shape[:2], 1), device=weight.device)
        for matrix, codes, scales in zip(weight, self.codes, self.scales, strict=True):  # one float32 copy at a time
            made = coded(matrix)
            codes.copy_(made[0].view(torch.uint8))
            scales.copy_(made[1])

    @property
    def static(self) -> bool:
        return self._by.grouped is not None and not self._exact

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        codes = self.codes.view(E4M3)
        if self.static:
            assert self._by.grouped is not None
            ends = counts.cumsum(0).to(torch.int32)
            return self._by.grouped(self._by.rows(rows), (codes, self.scales), ends, rows.dtype)
        parts = zip(codes, self.scales, rows.split(counts.tolist()), strict=True)
        return torch.cat([self._expert((matrix, scales), mine) for matrix, scales, mine in parts if len(mine)])

    def _expert(self, weight: Coded, rows: torch.Tensor) -> torch.Tensor:
        def product(some: torch.Tensor) -> torch.Tensor:
            return self._by.product(self._by.rows(some), weight, None, rows.dtype)

        return in_pieces(product, rows, EXACT_ROWS) if self._exact else product(rows)


# --- which models and devices ------------------------------------------------------------------------------------------


def refusal(spec: Spec) -> str:
    """Empty if all of the model's linear layers can be multiplied in FP8; else the reason why not, a whole clause."""
    for layer in spec.layers:
        shapes = {**linear_shapes(spec, layer), **expert_shapes(spec, layer)}
        for name, shape in shapes.items():
            if any(size % WIDTHS for size in shape[-2:]):
                return f"its {name} is {' × '.join(map(str, shape[-2:]))}, and FP8 products have widths that are multiples of {WIDTHS}"
    return ""


def device_refusal(device: torch.device) -> str:
    """Empty if this device multiplies in FP8, and rightly; else the reason why not, a whole clause."""
    if device.type != "cuda":
        return f"that is of GPUs, and the engine's device is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"GPUs multiply in FP8 from compute capability 8.9 on, and this one has {capability[0]}.{capability[1]}"
    return _tried(device, capability)[1]


def fp8_of(device: torch.device) -> Fp8:
    """Returns the operations of a device that `device_refusal` does not refuse."""
    found, reason = _tried(device, torch.cuda.get_device_capability(device))
    assert found is not None, reason
    return found


@cache
def _tried(device: torch.device, capability: tuple[int, int]) -> tuple[Fp8 | None, str]:
    """Returns the operations, or a clause that says why there are none."""
    plain = Fp8(_rows_of(device), scaled_product)
    if error := _failure(lambda: _deviation(plain, device)):
        return None, f"the products of this GPU in FP8 are not right ({error})"
    if capability not in ((9, 0), (10, 0)):
        return plain, ""
    grouped = replace(plain, grouped=grouped_product)
    if error := _failure(lambda: _grouped_deviation(grouped, device)):
        log.warning(
            "experts are multiplied one by one in FP8, and without CUDA graphs: the product of all is not right here (%s)",
            error,
        )
        return plain, ""
    return grouped, ""


def _rows_of(device: torch.device) -> Callable[[torch.Tensor], Coded]:
    """One kernel instead of five, where it makes the codes that torch's operations make."""
    try:
        from headrace.engine.native.runners.fp8_kernels import coded_rows as kernel
    except ImportError:
        return coded

    def coded_rows(x: torch.Tensor) -> Coded:
        return kernel(x, LARGEST, LEAST)

    x = _numbers(7, 96, 0).to(device, torch.bfloat16)

    def differing() -> float:
        found, expected = coded_rows(x), coded(x)
        same = torch.equal(found[1], expected[1])
        return float((found[0].float() != expected[0].float()).float().mean()) if same else 1.0

    if error := _failure(differing, most=0.0):
        log.warning(
            "activations are made codes of by torch's own operations on this device: the kernel is not used (%s)", error
        )
        return coded
    return coded_rows


def _failure(deviation: Callable[[], float], most: float = 0.01) -> str:
    """Empty if what was tried ran, and deviates by no more than `most`."""
    try:
        found = deviation()
    except Exception as problem:  # what libraries say of a device that they do not know has no common type
        return f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"
    return "" if found <= most else f"off by {found:.2g}"


def _numbers(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, rows)[:, None]


def _apart(found: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor) -> float:
    """The largest difference, as a share of what rows and outputs could make at most."""
    error = ((found.float() - expected).abs() / sizes).max()
    return float(error) if bool(error.isfinite()) else float("inf")


def _norms(x: Coded) -> torch.Tensor:
    """[..., n] of the rows that the codes stand for."""
    return (x[0].float() * x[1]).norm(dim=-1)


def _deviation(by: Fp8, device: torch.device) -> float:
    """The largest error of the products of a few rows, and of one, with a bias and without."""
    worst = 0.0
    for rows, inputs, outputs, biased in ((1, 64, 48, False), (17, 576, 160, True), (200, 1536, 96, False)):
        x, weight = (_numbers(*size).to(device, torch.bfloat16) for size in ((rows, inputs, 1), (outputs, inputs, 2)))
        pair = by.rows(x), coded(weight)
        sizes = _norms(pair[0])[:, None] * _norms(pair[1])
        bias = sizes.mean(0).to(torch.bfloat16) if biased else None
        found = by.product(*pair, bias, torch.bfloat16)
        most = sizes if bias is None else sizes + bias.float()
        worst = max(worst, _apart(found, emulated_product(*pair, bias, torch.float32), most))
    return worst


def _grouped_deviation(by: Fp8, device: torch.device) -> float:
    """The largest error with four experts, of which one has no rows."""
    counts = (5, 0, 17, 1)
    x = _numbers(sum(counts), 64, 1).to(device, torch.bfloat16)
    stack = torch.stack([_numbers(48, 64, seed) for seed in range(4)]).to(device, torch.bfloat16)
    ours, plain = (Fp8Stack(stack, ops, exact=False) for ops in (by, EMULATED))
    given = torch.tensor(counts, device=device)
    norms = stack.float().norm(dim=-1).repeat_interleave(given, 0)
    return _apart(ours(x, given), plain(x, given).float(), x.float().norm(dim=-1)[:, None] * norms)
