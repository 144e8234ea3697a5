"""The things that must be the same on all machines: packages, the model, and the user's files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import xxhash

from headrace.core.errors import ConfigError
from headrace.models.resolve import resolve_model
from headrace.processes.joining.greeting import Agreed, Terms
from headrace.settings.user_code import code_behind, packages_behind

# --- The packages that decide what an engine computes
# The packages that decide what an engine computes, and whether two machines have the same.


NAMES = ("torch", "transformers")


def own_packages() -> dict[str, str]:
    """Returns the versions of this environment, by name; empty for a package that is not installed."""
    return {name: _version(name) for name in NAMES}


def differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Returns which packages differ, in words; empty if none does. `+cpu` and `+cu130` are builds of one version for different devices."""
    return ", ".join(
        f"{name} {theirs.get(name) or 'none'} (the run has {version})"
        for name, version in ours.items()
        if theirs.get(name, "").partition("+")[0] != version.partition("+")[0]
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


# --- Whether the user's files on a worker's machine are those of the run
# Those that they import from beside them count too.


def code_terms(files: Iterable[str]) -> Terms:
    """The terms of a worker that runs these files, which name no model. Raises ConfigError for one that cannot be read."""
    found, named = {}, set(files)
    for file in sorted({*named, *(str(other) for one in named for other in code_behind(Path(one)))}):
        try:
            found[file] = _digest(Path(file))
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    return Terms("", found, packages_behind(map(Path, found)))


def agree_to(terms: Terms, own_model: str = "") -> Agreed:
    """The answer of this machine to terms of either kind. `own_model`: as for `agree`."""
    return agree(terms, own_model) if terms.model else Agreed(unable=code_problem(terms))


def code_problem(terms: Terms) -> str:
    """Returns what is wrong with the user's files on this machine, or with the packages that they import; empty if they are the run's."""
    for file, how in _others(terms.files):
        return (
            f"the run's file {file} is not on this machine ({how}): copy it here, to the same path"
            if how
            else f"{file} is not the run's: its content differs. Copy the run's file to this machine, or start the run anew if it is that one which has changed"
        )
    found, install = _other_packages(terms.packages)
    return found and f"packages that the run's files import are others on this machine: {found}; {install} here"


def changed_code(terms: Terms) -> str:
    """Returns which of the files of a run on this machine is another one now, or which package that they import, and what to do; empty if none is."""
    for file, how in _others(terms.files):
        return (
            f"{file} {f'cannot be read any more ({how})' if how else 'has changed'} since the run began, and a process that loads it now would compute "
            "something else than those before it; put it back, or stop the run and resume it with the new one"
        )
    return changed_packages(terms.packages)


def changed_packages(packages: Mapping[str, str]) -> str:
    """Returns which of the packages that a run's processes have loaded are others now, and what to do; empty if none is. `packages`: the versions at
    its beginning, by name."""
    found, install = _other_packages(packages)
    return found and (
        f"packages of the run have changed since it began: {found}, and a process that loads them now would compute something else than those before it; "
        f"{install}, or stop the run and resume it with the new ones"
    )


def _other_packages(packages: Mapping[str, str]) -> tuple[str, str]:
    """Returns which packages are others on this machine now, and the command that installs those of the run; empty if none is. `packages`: the
    versions that the run has, by name."""
    here = {name: _version(name) for name in packages}
    other = [f"{name}=={theirs}" for name, theirs in packages.items() if differing(here, {name: theirs})]
    return differing(here, packages), f"pip install {' '.join(other)}"


def _others(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the files that are not as they were, each with the reason why it cannot be read, or an empty text."""
    for file, theirs in files.items():
        try:
            if _digest(Path(file)) != theirs:
                yield file, ""
        except OSError as error:
            yield file, error.strerror or str(error)


def _digest(path: Path) -> str:
    """Returns 32 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


# --- Whether a worker elsewhere has the run's model
# An engine's weights are not compared: the trainer sends them, with their fingerprint (C3). Ranks of the trainer compare the files of
# weights among themselves.


CONFIGS = ("config.json", "generation_config.json")
FILES = (*CONFIGS, "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""The files that an engine reads, beside the weights."""


def terms_of(model: str, model_dir: Path) -> Terms:
    """`model`: the run's `model.path`; `model_dir`: where that is on this machine."""
    return Terms(model, digests(model_dir))


def digests(model_dir: Path) -> dict[str, str]:
    """Returns 32 hexadecimal digits for each file that is there. The version of transformers that wrote a config does not count."""
    found = {}
    for name in FILES:
        if (path := model_dir / name).is_file():
            found[name] = hashlib.sha256(_content(path)).hexdigest()[:32]
    return found


def weights_digest(model_dir: Path) -> str:
    """Returns a digest of the files with weights. It reads all of them, as loading them does afterwards."""
    digest = xxhash.xxh3_128()
    for path in sorted(path for path in model_dir.iterdir() if path.suffix in (".safetensors", ".bin")):
        digest.update(path.name)
        with path.open("rb") as file:
            while piece := file.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    if path.name not in CONFIGS:
        return data
    try:
        fields = json.loads(data)
    except ValueError:
        return data
    return json.dumps({**fields, "transformers_version": ""}, sort_keys=True).encode()


def agree(terms: Terms, own: str = "") -> Agreed:
    """The answer of this machine. `own`: its directory of the model, which need not hold weights; empty: as the run calls the model."""
    try:
        directory = _directory(own) if own else resolve_model(terms.model)
    except ConfigError as error:
        return Agreed(unable=f"the run's model is not on this machine: {error}; name its directory here with --model")
    here = digests(directory)
    if differ := sorted(name for name in {*here, *terms.files} if here.get(name) != terms.files.get(name)):
        return Agreed(
            unable=f"{directory} is not the run's model ({terms.model}): {', '.join(differ)} differ; copy the files of the run's machine, and "
            "name their directory with --model"
        )
    return Agreed(str(directory))


def _directory(own: str) -> Path:
    directory = Path(own).expanduser().absolute()
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} holds no config.json")
    return directory
