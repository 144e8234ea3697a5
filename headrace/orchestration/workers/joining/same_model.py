"""Whether a worker elsewhere has the run's model. Weights are not compared: the trainer sends them, with their fingerprint (C3)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from headrace.errors import ConfigError
from headrace.models.resolve import resolve_model
from headrace.orchestration.workers.joining.greeting import Agreed, Terms

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
