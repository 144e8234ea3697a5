"""Codes of activations in one kernel, in Triton: five of torch's own would cost more time than a small product. Imported where it is used."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def coded_rows(x: torch.Tensor, largest: float, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scales as `fp8.coded` does for finite x [n, k], bit for bit; a row with another number has none that is finite. A program takes a row, in
    steps that it reads twice."""
    x = x.contiguous()
    count, width = x.shape
    codes = torch.empty((count, width), dtype=torch.uint8, device=x.device)
    scales = torch.empty((count, 1), dtype=torch.float32, device=x.device)
    step = min(4096, max(16, triton.next_power_of_2(width)))
    if count:
        _code[(count,)](
            x=x, codes=codes, scales=scales, width=width, LARGEST=largest, LEAST=least, STEP=step, num_warps=4
        )
    return codes.view(torch.float8_e4m3fn), scales


@triton.jit
def _code(x, codes, scales, width, LARGEST: tl.constexpr, LEAST: tl.constexpr, STEP: tl.constexpr):
    row = tl.program_id(0)
    begin, place = row.to(tl.int64) * width, tl.arange(0, STEP)
    peak = tl.zeros([STEP], tl.float32)
    for start in range(0, width, STEP):
        part = tl.load(x + begin + start + place, mask=start + place < width, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.where(part == part, tl.abs(part), float("inf")))
    scale = tl.maximum(tl.div_rn(tl.max(peak, 0), LARGEST), LEAST)
    tl.store(scales + row, scale)
    for start in range(0, width, STEP):
        part = tl.load(x + begin + start + place, mask=start + place < width, other=0.0).to(tl.float32)
        code = _e4m3(tl.div_rn(part, scale))
        tl.store(codes + begin + start + place, code, mask=start + place < width)


@triton.jit
def _e4m3(x):
    """Rounds float32 of at most 448 to nearest even, by its bits: Triton's interpreter (3.6 to 3.9) loses the carry into the exponent."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # exponents are 120 lower, and 20 bits of 23 go
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # in units of 2**-9, which the sum rounds to
    code = tl.where(size < 0x3C800000, small, normal)  # 2**-6, the smallest normal number
    code = tl.where(size < 0x7F800000, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
