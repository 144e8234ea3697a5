"""The way in which the native engine serves a model, found before anything is loaded.

In a process of its own, because it imports torch and builds the model without weights, which the rehearsal of a run does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.own_families import FAMILIES
from headrace.models.images import FOLDER

SPEEDS = {
    "kernels": "fast, all sequences in one pass of C++ kernels",
    "fused": "for a GPU, all sequences in one pass of a decoder in PyTorch",
    "hugging face": "slower, all sequences in one pass of transformers' own layers",
    "own cache alone": "slow, one sequence after the other through transformers' own cache",
    "own cache": "slower, steps of all sequences in one pass of transformers over its own cache",
}
"""The speed of each way of serving, by the beginning of `Runner.path`."""
ASK = f"import sys; from {__name__} import answer; print(answer(*sys.argv[1:]))"
SECONDS = 120
"""Time for an answer; without one, the engine answers when it starts."""
ASKED = ("path", "device", "dtype", "exact", "max_adapters", "routing", "context_length", "kv_gib", "weights")
"""Settings that the answer depends on."""


def served_how(model_dir: Path, config: EngineConfig) -> str:
    """Returns the path and its speed in words; empty for the families that have a decoder of ours, of which there is nothing to find out,
    and if nothing was found in time. Raises ConfigError if the engine does not serve the model with these settings.
    """
    if config.is_server or (_is_ours(model_dir) and config.weights == "published"):
        return ""
    asked = json.dumps({name: getattr(config, name) for name in ASKED})
    command = [sys.executable, "-c", ASK, str(model_dir), asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return ""
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"the native engine cannot be made for {model_dir}: {last}; choose another model")
    found = json.loads(done.stdout.splitlines()[-1])
    if found["problem"]:
        raise ConfigError(found["problem"])
    return in_words(found["path"])


def in_words(path: str) -> str:
    """`path`: that of a runner. Returns it with its speed."""
    speed = next((words for begin, words in SPEEDS.items() if path.startswith(begin)), "")
    return f"{path}: {speed}" if speed else path


def _is_ours(model_dir: Path) -> bool:
    """Whether a family is there that decoders of ours surely serve, or nothing that could be asked about. Our decoders read no features of images."""
    if (model_dir / FOLDER).is_dir():
        return False
    try:
        found = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    family = FAMILIES.get(found.get("model_type"))
    return family is not None and family.sure


def answer(model_dir: str, asked: str) -> str:
    """Returns JSON with the `path` of the runner, or with the `problem` why there is none. Called in the process that is started for it."""
    config = replace(EngineConfig(), **json.loads(asked))
    from headrace.engine.native.core import NativeEngine

    try:
        return json.dumps({"path": NativeEngine(Path(model_dir), config, asleep=True).capabilities.path, "problem": ""})
    except ConfigError as error:
        return json.dumps({"path": "", "problem": str(error)})
