"""The Python in which the queue runs: the one that was started, with what headrace needs beside it.

A machine with a GPU often has Python, torch and transformers installed for all, and no network. What is missing is installed into a folder of the checkout,
from an index where there is one, else from wheels that were brought along; the machine's own Python stays as it is. Imports the standard library only.

    python -m benchmarks.device.packages --into wheels --python 3.12 [--but NAME ...]

on a machine with a network and headrace's own environment fetches those wheels: everything that headrace and its entries need, but torch and what the other
machine has already.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BESIDE = ROOT / "build" / "device-packages"
EXTRAS = ("tasks", "serve", "lora")
"""Extras of headrace that some lines need; without their packages these lines are not measured, and say so."""
NAME = re.compile(r"[A-Za-z0-9._-]+")
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
OWN = "torch"
"""Which build of it fits is a question of the machine: it is never fetched, nor what it asks for."""


def needed(extras: Sequence[str] = ()) -> Iterator[tuple[str, bool]]:
    """Yields every package that headrace and these of its extras need, with whether it is there; what is needed by one that is missing is not known yet.
    Versions are not looked at."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [
        *project["dependencies"],
        *(name for extra in extras for name in project["optional-dependencies"][extra]),
    ]
    seen = set[str]()
    while waiting:
        requirement = waiting.pop(0)
        match = NAME.match(requirement)
        assert match, requirement
        name = match[0].lower().replace("_", "-")
        if name in seen or not _applies(requirement):
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            yield requirement.split(";")[0].strip(), False
            continue
        yield name, True
        waiting += (found.requires or []) if name != OWN else []


def _applies(requirement: str) -> bool:
    """Whether a requirement's marker holds here, without extras."""
    if ";" not in requirement:
        return True
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement
    marker = Requirement(requirement).marker
    return marker is None or bool(marker.evaluate({"extra": ""}))


def missing(extras: Sequence[str] = ()) -> list[str]:
    return [name for name, there in needed(extras) if not there]


def provide(wheels: Path | None) -> dict[str, str]:
    """Returns the environment of the entries' processes, in which the packages are found. Raises SystemExit with the remedy if one cannot be had that
    headrace itself needs."""
    sys.path.insert(0, str(BESIDE))
    before: list[str] = []
    while (lacking := missing(EXTRAS)) and lacking != before:  # each round shows what the packages of the last one need
        _install([name for name in lacking if NAME.match(name)[0] != OWN], wheels)  # type: ignore[index]
        before = lacking
        importlib.invalidate_caches()
    if still := missing():
        raise SystemExit(remedy(still))
    if lacking:
        print(f"not here, so that some lines are not measured: {', '.join(lacking)}", flush=True)
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    path = os.pathsep.join([str(ROOT), str(BESIDE), *inherited])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _install(names: Sequence[str], wheels: Path | None) -> None:
    """Without what they need: a package that asks for torch would bring another build of it."""
    where = ["--no-index", "--find-links", str(wheels)] if wheels else []
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--target",
        str(BESIDE),
        *where,
    ]
    if subprocess.run([*command, *names], check=False, capture_output=True).returncode:
        for name in names:  # all or nothing is pip's rule: one that is not to be had must not keep the others away
            subprocess.run([*command, name], check=False, capture_output=True)


def remedy(lacking: Sequence[str]) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if any(NAME.match(name)[0] == OWN for name in lacking):  # type: ignore[index]
        return (
            f"this Python ({sys.executable}) has no torch; name one that has a CUDA build of it: make device PYTHON=..."
        )
    return (
        f"this Python ({sys.executable}) lacks {', '.join(lacking)}, and no index gave them. On a machine with a network and headrace's environment:\n"
        f"  python -m benchmarks.device.packages --into wheels --python {version}\n"
        "bring the folder here, and: make device WHEELS=wheels"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument(
        "--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="version on the other machine"
    )
    parser.add_argument("--but", nargs="*", default=[], help="packages that it has")
    options = parser.parse_args()
    wanted = [name for name, there in needed(EXTRAS) if there and name not in (OWN, *options.but)]
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in wanted]
    of = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", options.python]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *of, *platforms, "--dest", str(options.into)]
    lost = [name for name in pinned if subprocess.run([*command, name], check=False).returncode]
    print(
        f"{len(pinned) - len(lost)} wheels are in {options.into}"
        + (f"; not to be had: {', '.join(lost)}" if lost else "")
    )
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
