"""Images in prompts: what each is, which models see them, and the numbers that stand for them among the tokens.

A prompt with an image holds a token for each of the image's features. All of them have one number in the model's vocabulary, so that two
prompts with different images would look alike to whoever compares tokens. Here each has a number of its own instead: the rows of a table of
features follow the rows of the embedding. Shared prefixes, caches, packed trees, digests and journals then tell images apart without knowing of
them, and a model that lacks the table refuses the tokens, because they are outside of its vocabulary.

The table belongs to a directory beside the cached models, which also has the model's language part. Engine and trainer load that directory.
Pixels stay in it, one file for each image, named by the digest of its bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.printing import echo
from headrace.models.control_tokens import Written
from headrace.models.resolve import cache_dir
from headrace.settings.extras import install, is_installed
from headrace.version import __version__

SERVED = (
    *("idefics3", "smolvlm", "internvl", "llava"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("gemma3", "gemma4"),
)
"""Values of `model_type` whose images are tokens among others: features in place of embeddings, and attention that is causal but within an image."""
TEXT_TOO = ("qwen3_5", "qwen3_5_moe", "gemma3", "gemma4")
"""Kinds in `SERVED` that are language models as a whole, too: without images they are not taken apart."""
ALWAYS_APART = tuple(kind for kind in SERVED if kind not in TEXT_TOO)
REFUSED = {
    "gemma3n": "its tower is one of the package timm",
    "gemma4_unified": "it has no tower, and its weights for images are part of its language model",
    "paligemma": "all tokens of its prompt see each other",
}
"""Well-known types that are not served with images, and the reason."""
_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Modes of Pillow that a PNG holds, without those of more than eight bits."""
INDEX, ROWS = "index.json", "rows.safetensors"
FOLDER = "images"
"""Its place in the directory of a model: the index, the table of features, and the images."""


# --- One image of a data set


@dataclass(frozen=True)
class ImageFile:
    data: bytes
    """The file as it was given: PNG, JPEG, ..."""
    where: str = field(default="", compare=False)
    """Its place among the rows, in words."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def image_of(value: Any, folder: Path) -> ImageFile:
    """Returns the image of a value in a column: a path (relative to `folder`), a `data:` URL, bytes, an entry `{bytes, path}` as `datasets` and
    Parquet have it, or an image of Pillow. Raises ConfigError, without a subject, for anything else and for a file that is not there."""
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (bytes, bytearray)):
        return ImageFile(bytes(value))
    if isinstance(value, str) and value.startswith("data:"):
        try:
            return ImageFile(base64.b64decode(value.partition("base64,")[2], validate=True))
        except binascii.Error as error:
            raise ConfigError(f"holds a data: URL that is not base64 ({error})") from None
    if isinstance(value, str) and value:
        path = folder / Path(value).expanduser()
        try:
            return ImageFile(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"names {path}, which cannot be read ({error.strerror}); paths are relative to the file with the rows"
            ) from None
    if callable(getattr(value, "save", None)):
        return _of_pillow(value)
    raise ConfigError(
        f"holds {'no image (null)' if value is None else f'a value of type {type(value).__name__}'}; give a path, bytes or a data: URL, or an "
        "empty list in a row without an image"
    )


def _of_pillow(image: Any) -> ImageFile:
    """Returns an image of Pillow as a PNG, upright: the side that is up is said beside the pixels of a photograph, and Pillow leaves it out of the
    file that it writes."""
    from PIL import ImageOps

    if image.mode[0] in "IF":
        raise ConfigError(
            f"holds an image of Pillow with more than eight bits a channel ({image.mode}); convert it to RGB, scaled to eight bits"
        )
    saved = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        (upright if image.mode in _OF_PNG else upright.convert("RGB")).save(saved, format="PNG")
    except Exception as error:  # every format's reader raises its own kind
        raise ConfigError(f"holds an image of Pillow that cannot be read ({error}); pass it in the mode RGB") from None
    return ImageFile(saved.getvalue())


def images_of(value: Any, folder: Path) -> list[ImageFile]:
    """Returns the images of a column in one row, which holds one of them or a list."""
    return [image_of(one, folder) for one in value] if isinstance(value, (list, tuple)) else [image_of(value, folder)]


def as_text(value: Any, folder: Path) -> Any:
    """Returns the images of a column in one row as `data:` URLs, so that a journal can hold them. Raises ConfigError as `image_of`."""
    if isinstance(value, (list, tuple)):
        return [as_text(one, folder) for one in value]
    return f"data:application/octet-stream;base64,{base64.b64encode(image_of(value, folder).data).decode()}"


# --- The images that a model's directory knows


class KnownImages:
    """The images of a model's directory, by their digests."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError if the directory is damaged."""
        self._folder = directory / FOLDER
        try:
            index = index_of(directory)
            self._images: dict[str, list[int]] = index["images"]
            self._layouts = [tuple(layout) for layout in index["layouts"]]
            self.placeholder, self._vocabulary = int(index["placeholder"]), int(index["vocabulary"])
            self._mark = index.get("mark") or {"token": self.placeholder, "text": "", "around": ("", "")}
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"the images in {directory} cannot be read ({error}); remove the directory, and start again"
            ) from None

    def path(self, digest: str) -> Path:
        """Returns the file of an image. Raises ConfigError for one whose features were not computed."""
        self._find(digest)
        return self._folder / digest

    def tokens(self, digest: str) -> tuple[int, ...]:
        """Returns the tokens of an image: those of the vocabulary that the model has around and between its features, and a number for each of
        these. Raises ConfigError as `path`."""
        first, layout = self._find(digest)
        numbers = iter(range(self._vocabulary + first, self._vocabulary + first + len(self._layouts[layout])))
        return tuple(next(numbers) if token == self.placeholder else token for token in self._layouts[layout])

    def digest_of(self, file: str) -> str:
        """Returns the digest of an image by its file, as rows name it. Raises ConfigError for any other file."""
        digest = Path(file).name
        if digest not in self._images:
            raise ConfigError(
                f"it shows the image {file}, which is none of this run's: give the path that the row has in a column of task.images. Features are computed "
                "before the run, so that an image made during a rollout cannot be shown"
            )
        return digest

    def _find(self, digest: str) -> list[int]:
        if digest not in self._images:
            raise ConfigError(
                f"holds an image (sha256 {digest[:12]}...) whose features were not computed: it has changed since the start; start again"
            )
        return self._images[digest]

    def placed(self, tokens: Sequence[int], digests: Sequence[str]) -> tuple[int, ...]:
        """Returns the tokens of a conversation with those of the images where the template has marked their places. Raises ConfigError if it has
        marked another number of places, and as `tokens`."""
        mark = self._mark["token"]
        if (marked := tokens.count(mark)) != len(digests):
            raise ConfigError(
                f"the chat template marks {marked} places for {len(digests)} images; use one that writes the parts of a message, images among them"
            )
        given = iter(digests)
        found = ((self.tokens(next(given)) if token == mark else (token,)) for token in tokens)
        return tuple(itertools.chain.from_iterable(found))

    def surrounded(self, written: Written) -> Written:
        """Returns a conversation as the template has written it, with the text that the model's processor writes around each place of an image."""
        return written.with_around(self._mark["text"], *self._mark["around"])

    def in_vocabulary(self, tokens: Sequence[int]) -> list[int]:
        """Returns tokens with the model's own number in place of those of features, as tokenizers know them."""
        return [token if token < self._vocabulary else self.placeholder for token in tokens]


def known_images(directory: Path) -> KnownImages | None:
    """Returns the images that a model's directory knows; None if it is not of a model with images."""
    return KnownImages(directory) if (directory / FOLDER).is_dir() else None


# --- The directory of a model and its images


def type_of(model_dir: Path) -> str:
    try:
        return str(json.loads((model_dir / "config.json").read_text(encoding="utf-8")).get("model_type", ""))
    except (OSError, ValueError):
        return ""


def with_images(model_dir: Path, images: Callable[[], Iterable[ImageFile]], column: str = "") -> Path:
    """Returns the directory that engine and trainer load: the language part of a model that sees, and the features of all `images`, which are
    computed once and kept. A model that does not see is returned as it is.

    `images`: yields them in an order that is always the same, one in memory at a time; called again where features are to be computed. `column`: the setting that asks for images, and its value; empty if none does. Raises ConfigError for a model whose images are not served, and
    for what cannot be read as an image."""
    kind = type_of(model_dir)
    if kind not in (SERVED if column else ALWAYS_APART):
        if column:
            why = REFUSED.get(kind, f"{kind or 'it'} is not among the types whose images are served")
            raise ConfigError(
                f"{column} shows images to {model_dir.name}{f' ({kind})' if kind in REFUSED else ''}, and that is not served: {why}; choose a model of the type "
                f"{', '.join(SERVED[:-1])} or {SERVED[-1]}, or remove the setting"
            )
        return model_dir
    if not is_installed("PIL"):
        raise ConfigError(
            f"{model_dir.name} is a model of the type {kind}, whose images need the package Pillow: {install('vision')}"
        )
    home = cache_dir() / "vision" / _digest_of(model_dir)
    digests = list(dict.fromkeys(image.digest for image in images()))
    to = home / hashlib.sha256("\n".join(digests).encode()).hexdigest()[:24]
    if not (to / FOLDER / INDEX).exists():
        _make(model_dir, home, to, digests=digests, images=images())
    return to


def index_of(directory: Path) -> dict[str, Any]:
    """Returns what is known of the images of a model's directory that has some."""
    found: dict[str, Any] = json.loads((directory / FOLDER / INDEX).read_text(encoding="utf-8"))
    return found


def source_of(directory: Path) -> Path | None:
    """Returns the directory of the whole model, of which `directory` has the language part; None if it is a whole one."""
    return Path(index_of(directory)["source"]) if (directory / FOLDER / INDEX).exists() else None


def _digest_of(model_dir: Path) -> str:
    """Returns a digest of the model's files by size and time, and of what computes features."""
    import importlib.metadata as metadata

    versions = [metadata.version(name) for name in ("torch", "transformers", "pillow")]
    files = sorted(path for path in model_dir.iterdir() if path.is_file())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr((__version__, versions, str(model_dir), stats)).encode()).hexdigest()[:24]


_PROGRAM = """
import os, signal, sys
from headrace.processes.health import family
os.environ[family.PARENT] = sys.argv[1]
family.signal_me_when_orphaned(signal.SIGKILL)
from headrace.models.vision import main
sys.exit(main(sys.stdin.read()))
"""
"""The program that computes features. It ends with whoever has asked for them."""


def _make(model_dir: Path, home: Path, to: Path, *, digests: Sequence[str], images: Iterable[ImageFile]) -> None:
    """Works in a process of its own, so that the caller never imports torch, and in a directory that is renamed when it is whole."""
    if digests:
        echo(f"computing the features of {len(digests)} images, once for this model", err=True)
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".images-", dir=home) as work:
        made = Path(work) / "model"
        (made / FOLDER).mkdir(parents=True)
        places: dict[str, str] = {}
        for image in images:
            (made / FOLDER / image.digest).write_bytes(image.data)
            places.setdefault(image.digest, image.where)
        if places.keys() != set(digests):
            raise ConfigError("an image has changed while it was read; start again")
        ordered = {digest: places[digest] for digest in digests}
        asked = json.dumps({"source": str(model_dir), "home": str(home), "made": str(made), "images": ordered})
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(os.getpid())],
            input=asked,
            stdout=2,
            stderr=subprocess.PIPE,
            text=True,
        )  # its output is how far it is; the last line of the rest, what is wrong
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ConfigError(f"{model_dir.name}: {last}")
        move_in(made, to, f"{FOLDER}/{INDEX}")


def move_in(made: Path, to: Path, whole: str) -> None:
    """Gives a directory that is complete its name. `whole`: a file by which a complete one is known."""
    try:
        made.rename(to)
    except OSError:
        if not (to / whole).exists():  # otherwise another process was first, and what it made is as good
            shutil.rmtree(to, ignore_errors=True)
            raise
