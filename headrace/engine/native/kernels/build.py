"""Compiles the kernels for this machine, once: the library is kept in the cache under a name made of all that it depends on.

python -m headrace.engine.native.kernels.build        compiles now (`make setup` does) and says what came of it
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headrace.models import cache_dir

SOURCE = Path(__file__).parent / "src"
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 300
"""Enough for a machine that is busy; about 5 are usual."""


@dataclass(frozen=True)
class Built:
    library: Path | None
    reason: str
    """Why there is none; how it was had where there is one."""


@cache
def built(instructions: str = "native") -> Built:
    """Never raises: without kernels the engine is slower, not wrong. `instructions`: as the compiler calls a set of them."""
    compiler = _compiler()
    if compiler is None:
        return Built(None, f"no C++ compiler ({', '.join(COMPILERS)}, or the one that $CXX names) was found")
    command = [compiler, *_flags(instructions), str(SOURCE / "decoder.cpp")]
    try:
        library = cache_dir() / "kernels" / f"decoder-{_fingerprint(command)}.so"
        if library.exists():
            return Built(library, "compiled before")
        library.parent.mkdir(parents=True, exist_ok=True)
        return _compile(command, library)
    except (OSError, subprocess.SubprocessError) as error:
        return Built(None, f"{compiler} could not be run: {error}")


def _compile(command: list[str], library: Path) -> Built:
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        made = Path(directory) / library.name
        result = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, timeout=SECONDS)
        if result.returncode:
            return Built(None, f"{command[0]} failed: {result.stderr.strip()[-500:] or result.returncode}")
        made.replace(library)  # at once: two engines may start at the same time
    return Built(library, f"compiled with {command[0]}")


def _compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def _flags(instructions: str) -> list[str]:
    option = "-mcpu" if platform.machine() in ("arm64", "aarch64") else "-march"
    return ["-O3", f"{option}={instructions}", "-std=c++17", "-shared", "-fPIC", "-pthread", "-Wno-psabi"]


def _fingerprint(command: list[str]) -> str:
    """Of the source, the compiler, the flags, and the processor that `native` stands for."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, timeout=60).stdout
    parts = [version, *command[1:-1], platform.machine(), _processor()]
    parts += [path.read_text(encoding="utf-8") for path in sorted(SOURCE.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Its instruction sets, where the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


if __name__ == "__main__":
    found = built()
    print(f"kernels: {found.reason}" + ("" if found.library else "; the engine runs in PyTorch, which is slower"))
    sys.exit(0)
