"""The files that a model directory must hold, and the headers of its weight files. Imports nothing heavy.

A safetensors file consists of 8 bytes with the length of its header (little endian), the header (JSON: name -> dtype, shape,
data_offsets) and the data. So the number of parameters, and whether the file is complete, are known without reading a weight
(format: https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.errors import ConfigError

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
    one = directory / "model.safetensors"
    return [one] if one.exists() else sorted(directory.glob("*.safetensors"))


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
    end = max((one.end for one in stored.values()), default=8 + length)
    if size < end:
        raise ValueError(f"is cut off: its header announces {end:,} bytes, and the file has {size:,}")
    return stored


def _stored(entry: dict[str, Any], start: int) -> Stored:
    """`start`: position of the first tensor."""
    begin, end = entry["data_offsets"]
    return Stored(entry["dtype"], tuple(entry["shape"]), start + begin, start + end)
