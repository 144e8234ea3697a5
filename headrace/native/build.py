"""Compiles C++ for this machine, once: a library is kept in the cache under a name made of all that it depends on."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parent / "src"
COMPILERS = ("c++", "g++", "clang++")
LIMIT = "HEADRACE_INSTRUCTIONS"
"""The environment variable by which a person limits the instruction set, so that a slower kind of processor can be tried."""
SECONDS = 1800
"""Enough for a machine that is slow and busy; about 5 are usual."""


@dataclass(frozen=True)
class Built:
    library: Path | None
    reason: str
    """If there is no library, the reason; otherwise how it was obtained."""


def compiled(source: Path, cache: Path, instructions: str = "native", flags: tuple[str, ...] = ()) -> Built:
    """The library of `source`, which includes headers of its own folder and of SHARED. Never raises.

    `instructions`: the compiler's name of an instruction set; `native` is this machine's, or the one that $HEADRACE_INSTRUCTIONS
    names. `cache`: the folder in which libraries are kept. `flags`: further flags for the compiler.
    """
    compiler = _compiler()
    if compiler is None:
        return Built(None, f"no C++ compiler ({', '.join(COMPILERS)}, or the one that $CXX names) was found")
    command = [compiler, *_flags(instructions), *flags, f"-I{SHARED}", str(source)]
    try:
        library = cache / f"{source.stem}-{_fingerprint(command, source.parent)}.so"
        if library.exists():
            return Built(library, "compiled before")
        library.parent.mkdir(parents=True, exist_ok=True)
        return _compile(command, library)
    except (OSError, subprocess.SubprocessError) as error:
        return Built(None, f"{compiler} could not be run: {error}")


def functions_of(library: Path | None, signatures: Mapping[str, tuple[Any, Sequence[Any]]]) -> Any | None:
    """Returns the functions of a library with the types of their results and arguments, or None if there is none, or this processor cannot run it.
    ctypes releases the GIL in a call."""
    if library is None:
        return None
    functions = ctypes.CDLL(str(library))
    for name, (result, arguments) in signatures.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions if functions.headrace_begin() else None


def _compile(command: list[str], library: Path) -> Built:
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        made = Path(directory) / library.name
        result = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, timeout=SECONDS)
        if result.returncode:
            return Built(None, f"{command[0]} failed: {result.stderr.strip()[-500:] or result.returncode}")
        made.replace(library)  # at once: two processes may start at the same time
    return Built(library, f"compiled with {command[0]}")


def _compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def _flags(instructions: str) -> list[str]:
    option = "-mcpu" if platform.machine() in ("arm64", "aarch64") else "-march"
    if instructions == "native":
        instructions = os.environ.get(LIMIT, "native")
    return ["-O3", f"{option}={instructions}", "-std=c++17", "-shared", "-fPIC", "-pthread", "-Wno-psabi"]


def _fingerprint(command: list[str], folder: Path) -> str:
    """A hash of the source, the compiler, the flags, and the processor that `native` stands for."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, timeout=60).stdout
    flags = [part for part in command[1:-1] if not part.startswith("-I")]
    parts = [version, *flags, platform.machine(), _processor()]
    for place in (SHARED, folder):
        parts += [path.read_text(encoding="utf-8") for path in sorted(place.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def kernels_mark() -> str:
    """Returns a hash of all C++ sources of the package and of the instruction sets that they are compiled for: kernels with the same mark give the
    same bits, whatever the processor is called (virtual machines call several generations alike)."""
    found = hashlib.sha256("\0".join([platform.machine(), _processor(), os.environ.get(LIMIT, "")]).encode())
    for path in sorted(SHARED.parents[1].glob("**/src/*")):
        if path.suffix in (".h", ".cpp"):
            found.update(path.read_bytes())
    return found.hexdigest()[:8]


def _processor() -> str:
    """The processor's instruction sets, if the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
