"""One file of products for each kind of processor: right on every kind that can be executed, or emulated, here."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from ctypes import byref
from pathlib import Path

import pytest
import torch

from headrace.engine.native.kernels import binding
from headrace.engine.native.kernels.runner import SIDE, Packer
from headrace.native.build import LIMIT, SHARED
from support.few import few

HERE = Path(__file__).parent
TIERS = {
    "x86-64-v2": "portable",
    "haswell": "AVX2",
    "skylake-avx512": "AVX-512",
    "cascadelake": "AVX-512",
    "cooperlake": "AVX512-BF16",
    "znver4": "AVX512-BF16",
    "sapphirerapids": "AMX",
}
LIKE_SKYLAKE = pytest.param("cascadelake", marks=pytest.mark.slow)  # the kernels use nothing that it has besides
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of another processor")
compiler = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(compiler is None, reason="no C++ compiler here")


def build(target: Path, *flags: str, command: str | None = None, source: Path = HERE / "products.cpp") -> str:
    """Compiles; what the compiler complains of, empty if nothing."""
    line = [
        command or compiler,
        "-O2",
        "-std=c++17",
        "-Wno-psabi",
        f"-I{SHARED}",
        *flags,
        str(source),
        "-o",
        str(target),
    ]
    return subprocess.run(line, capture_output=True, text=True).stderr


def checked(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


def known(instructions: str) -> bool:
    line = [str(compiler), f"-march={instructions}", "-E", "-x", "c++", "/dev/null"]
    return subprocess.run(line, capture_output=True).returncode == 0


@pytest.mark.slow
@x86
@pytest.mark.parametrize("instructions", [tier if tier != "cascadelake" else LIKE_SKYLAKE for tier in TIERS])
def test_products_of_each_tier_are_right_and_do_not_depend_on_the_number_of_rows(instructions, tmp_path):
    if not known(instructions):
        pytest.skip(f"the compiler does not know {instructions}")
    assert build(tmp_path / "products", f"-march={instructions}") == ""
    told = checked(str(tmp_path / "products"))
    if told == "cannot be executed here":
        pytest.skip(f"this processor cannot execute {instructions}; it was compiled")
    assert told == TIERS[instructions]


@pytest.mark.slow
@x86
def test_products_of_the_matrix_unit_are_right_by_tiles_in_software(tmp_path):
    assert build(tmp_path / "products", "-march=cooperlake", "-include", str(HERE / "amx_in_software.h")) == ""
    told = checked(str(tmp_path / "products"))
    if told == "cannot be executed here":
        pytest.skip("this processor lacks AVX512-BF16, which stands beside the tiles; it was compiled")
    assert told == "AMX"


@x86
@pytest.mark.parametrize("instructions", few(["haswell", "sapphirerapids"], keep=1))
def test_codes_lie_where_the_products_of_each_tier_look_for_them(instructions, tmp_path):
    """In pairs of inputs for rows of bf16, which the engine multiplies where an instruction does it, and which other tiers multiply here."""
    if not known(instructions):
        pytest.skip(f"the compiler does not know {instructions}")
    engine = f"-I{SHARED.parent.parent / 'engine' / 'native' / 'kernels' / 'src'}"
    assert build(tmp_path / "quantised", f"-march={instructions}", engine, source=HERE / "quantised.cpp") == ""
    told = checked(str(tmp_path / "quantised"))
    if told == "cannot be executed here":
        pytest.skip(f"this processor cannot execute {instructions}; it was compiled")
    assert told == TIERS[instructions]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_librarys_own_product_is_right(dtype):
    """In the calling thread, which has not prepared itself as those of a team have. A row's result has the same bits beside few rows
    and many, whose products are taken in pieces of the sum."""
    library = binding.library(dtype=str(dtype).removeprefix("torch."))
    generator = torch.Generator().manual_seed(0)
    rows, inputs = 7 * SIDE, 22 * SIDE
    x, weight = (torch.randn(count, inputs, generator=generator).to(dtype) for count in (rows, 70))
    packer = Packer(library, dtype)
    linear = packer.linear((weight, None))
    taken = torch.bfloat16 if library.headrace_taken_bytes() == 2 else torch.float32
    blocks = x.to(taken).view(-1, SIDE, inputs // SIDE, SIDE).transpose(1, 2).contiguous()
    expected = x.double() @ weight.double().T
    products = []
    for many in (SIDE, 2 * SIDE, rows):
        c = torch.zeros(many // SIDE, 3, SIDE, SIDE)
        library.headrace_product(blocks.data_ptr(), many, byref(linear), c.data_ptr())
        products.append(c.transpose(1, 2).reshape(many, -1)[:, :70])
        assert (products[-1] - expected[:many]).abs().max() < 1e-3
    assert all(torch.equal(product[:SIDE], products[0]) for product in products)


def test_products_of_neon_are_right_on_an_emulated_processor(tmp_path):
    cross, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if cross is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu and qemu-user)")
    assert build(tmp_path / "products", "-static", command=cross) == ""
    assert checked(emulator, str(tmp_path / "products")) == "NEON"


@pytest.mark.slow
@x86
@pytest.mark.parametrize(
    "instructions",
    [
        "haswell",
        "sapphirerapids",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("skylake-avx512", "cascadelake", "znver4")),
    ],
)
def test_the_kernels_of_both_compile_for_each_processor(instructions, tmp_path):
    if not known(instructions):
        pytest.skip(f"the compiler does not know {instructions}")
    package = SHARED.parent.parent
    sources = [*package.glob("engine/**/decoder.cpp"), *package.glob("trainer/**/training.cpp")]
    assert len(sources) == 2
    for source in sources:  # -O0: an instruction that the processor lacks is an error without optimisation too
        assert "error" not in build(tmp_path / "x.s", f"-march={instructions}", "-O0", "-S", source=source)


@pytest.mark.slow
@x86
def test_an_environment_variable_limits_the_instructions_of_all_kernels():
    code = (
        "from headrace.engine.native.kernels import binding; from headrace.trainer.kernels import binding as trainer\n"
        "print(binding.tier(), trainer.tier())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, LIMIT: "haswell"},
        capture_output=True,
        text=True,
    )
    assert result.stdout.split() == ["AVX2", "AVX2"], result.stderr
