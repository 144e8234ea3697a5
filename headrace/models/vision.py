"""A model that sees, taken apart: its language part as a model of its own, and the features of images, made once by the part that sees.

A process of its own does this before a run (`images.py`), and an export puts the parts together again. That the language part with the features
is the whole model is not believed but tried: both forward a text, and a text with an image.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.core.printing import echo
from headrace.models.image_axes import axes_of, grid_moves
from headrace.models.image_blocks import ahead_in_image, kinds_that_see_ahead
from headrace.models.image_embedding import ADDED, AHEAD, FEATURES, MOVES, show_images
from headrace.models.images import FOLDER, INDEX, ROWS, KnownImages, move_in
from headrace.models.tokenizer import load_tokenizer

TOLERANCE = 1e-4
"""Largest difference of logits from the whole model's, relative to their norm. Rounding causes 1e-6, a wrong feature 1."""
LANGUAGE = "language"
TELL = 20.0
"""Seconds between two lines that say how far the features are: a photograph may take a minute."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


# --- The families: how an image becomes features, and the tokens around these


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One image as a model sees it."""

    inputs: dict[str, Tensor]
    """The arguments of the model's forward pass."""
    features: Tensor
    """[n, H] in the place of n embeddings."""
    text: str
    """The tokens that the model's processor writes for the image, as text."""
    moves: Tensor | None = None
    """[n, 4] where the image has places on three axes."""
    added: Tensor | None = None
    """[n, layers, H] where the first layers add features of their own."""
    ahead: Tensor | None = None
    """[n] where the tokens of an image see ahead."""
    types: str = ""
    """The argument by which the whole model is told which tokens are images; empty if it needs none."""

    def tables(self) -> dict[str, Tensor]:
        found = {FEATURES: self.features, MOVES: self.moves, ADDED: self.added, AHEAD: self.ahead}
        return {name: tensor.contiguous() for name, tensor in found.items() if tensor is not None}


def _plain(processor: Any, model: Any, tokenizer: Any, image: Any) -> Seen:
    """LLaVA: the placeholder alone, once a feature (transformers, processing_llava.py)."""
    inputs = dict(processor(images=image, return_tensors="pt"))
    features = _features(model, inputs)
    return Seen(inputs=inputs, features=features, text=_word(model, tokenizer) * len(features))


def _internvl(processor: Any, model: Any, tokenizer: Any, image: Any) -> Seen:
    """InternVL: tiles, and marks of begin and end (transformers, processing_internvl.py, whose default crops)."""
    inputs = dict(processor(images=[image], crop_to_patches=True, return_tensors="pt"))
    inputs.pop("num_patches", None)
    features = _features(model, inputs)
    begin, end = (
        getattr(tokenizer, name, word) for name, word in (("start_image_token", "<img>"), ("end_image_token", "</img>"))
    )
    text = f"{begin}{_word(model, tokenizer) * len(features)}{end}"
    return Seen(inputs=inputs, features=features, text=text)


def _idefics(processor: Any, model: Any, tokenizer: Any, image: Any) -> Seen:
    """Idefics3 and SmolVLM: tiles in rows, each with the mark of its place, then the whole image (transformers, processing_smolvlm.py)."""
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    inputs = dict(processor(images=[[image]], return_row_col_info=True, return_tensors="pt"))
    rows, cols = (int(torch.as_tensor(inputs.pop(name)).flatten()[0]) for name in ("rows", "cols"))
    features = _features(model, inputs)
    length = len(features) // (rows * cols + 1)
    around = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
    whole = getattr(tokenizer, "global_image_token", "<global-img>")
    text = get_image_prompt_string(
        image_rows=rows,
        image_cols=cols,
        image_seq_len=length,
        fake_token_around_image=around,
        image_token=_word(model, tokenizer),
        global_image_token=whole,
    )
    return Seen(inputs=inputs, features=features, text=text)


def _qwen(processor: Any, model: Any, tokenizer: Any, image: Any) -> Seen:
    """Qwen's: a grid of features, each from a square of patches (transformers, processing_qwen2_vl.py). Marks of begin and end are in the template."""
    inputs = dict(processor(images=[image], return_tensors="pt"))
    found = model.get_image_features(**inputs, return_dict=True)
    features = torch.cat(list(found.pooler_output))
    merged = model.config.vision_config.spatial_merge_size
    _, height, width = (inputs["image_grid_thw"][0] // merged).tolist()
    layers = getattr(found, "deepstack_features", None)
    return Seen(
        inputs=inputs,
        features=features,
        text=_word(model, tokenizer) * len(features),
        moves=grid_moves(height, width),
        added=torch.stack([torch.cat(list(layer)) for layer in layers], 1) if layers else None,
        types="mm_token_type_ids",
    )


def _gemma3(processor: Any, model: Any, tokenizer: Any, image: Any) -> Seen:
    """Gemma 3: marks of begin and end; the empty lines around them are `AROUND` (transformers, processing_gemma3.py)."""
    if getattr(processor, "do_pan_and_scan", None):
        raise ConfigError(
            "its preprocessor_config.json shows parts of an image beside the whole (do_pan_and_scan), which is not served; set that to false there"
        )
    inputs = {"pixel_values": processor(images=image, return_tensors="pt")["pixel_values"]}
    return _fenced(model, tokenizer, inputs, ahead=True, types="token_type_ids")


def _gemma4(processor: Any, model: Any, tokenizer: Any, image: Any) -> Seen:
    """Gemma 4: marks of begin and end, and as many features as its budget holds for an image of this shape (transformers, processing_gemma4.py). Only
    the larger ones of its models let an image see ahead."""
    inputs = dict(processor(images=image, return_tensors="pt"))
    inputs.pop("num_soft_tokens_per_image", None)
    ahead = model.config.get_text_config().use_bidirectional_attention == "vision"
    return _fenced(model, tokenizer, inputs, ahead=ahead, types="mm_token_type_ids")


def _fenced(model: Any, tokenizer: Any, inputs: dict[str, Tensor], *, ahead: bool, types: str) -> Seen:
    """Placeholders between marks of begin and end. `ahead`: whether the tokens of the image see each other."""
    features = _features(model, inputs)
    begin, end = tokenizer.convert_ids_to_tokens([model.config.boi_token_id, model.config.eoi_token_id])
    return Seen(
        inputs=inputs,
        features=features,
        text=f"{begin}{_word(model, tokenizer) * len(features)}{end}",
        ahead=ahead_in_image(len(features)) if ahead else None,
        types=types,
    )


FAMILIES: dict[str, Callable[[Any, Any, Any, Any], Seen]] = {
    "idefics3": _idefics,
    "smolvlm": _idefics,
    "internvl": _internvl,
    "llava": _plain,
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}
AROUND = {"gemma3": ("\n\n", "\n\n")}
"""The texts that a model's processor writes before and behind an image: a tokenizer joins them with what stands beside them. The template of such a
model marks an image by its begin, and not by a placeholder."""
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
}
"""Types of language parts that are no causal LMs in transformers: the type that computes the same of a text, and settings that it needs for that."""


def _word(model: Any, tokenizer: Any) -> str:
    return str(tokenizer.convert_ids_to_tokens(model.config.image_token_id))


def _features(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    found = model.get_image_features(**inputs, return_dict=True).pooler_output
    parts = found if isinstance(found, (list, tuple)) else list(found)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


# --- The language part


def load_whole(directory: Path) -> Any:
    """Returns the whole model in float32. Raises ConfigError if it cannot be loaded, or lacks a weight."""
    from transformers import AutoModelForImageTextToText

    try:
        model, info = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # every library raises its own kind
        raise ConfigError(f"cannot load a model that sees from {directory}: {error}") from error
    if wrong := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
        raise ConfigError(
            f"the weights in {directory} lack or do not fit {len(wrong)} parameters of its config.json, the first: {wrong[0]}; save the model "
            "again with `save_pretrained`"
        )
    return model.eval()


def language_part(whole: Any) -> Any:
    """Returns the language part as a causal LM of its own, which shares the weights of the whole."""
    from transformers import AutoModelForCausalLM

    config = _language_config(whole.config.get_text_config(decoder=True))
    config.tie_word_embeddings = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(_language_state(whole, model), strict=True, assign=True)
    model.tie_weights()
    return _with_buffers(model, whole).eval()


def _language_config(text: Any) -> Any:
    from transformers import AutoConfig

    if text.model_type not in PARTS:
        return deepcopy(text)
    given = {name: value for name, value in text.to_dict().items() if name != "model_type"}
    given["rope_parameters"] = {
        name: value for name, value in given["rope_parameters"].items() if not name.startswith("mrope")
    }
    kind, more = PARTS[text.model_type]
    return AutoConfig.for_model(kind, **given, **more)


def _language_state(whole: Any, model: Any) -> dict[str, Tensor]:
    inner = model.base_model_prefix
    state = {f"{inner}.{name}": tensor for name, tensor in whole.model.get_decoder().state_dict().items()}
    return state | {f"lm_head.{name}": tensor for name, tensor in whole.get_output_embeddings().state_dict().items()}


def _with_buffers(model: Any, whole: Any) -> Any:
    """Gives buffers that are no weights, such as rotary frequencies, the values that they have in the whole."""
    for (_, own), (_, given) in zip(
        getattr(model, model.base_model_prefix).named_modules(), whole.model.get_decoder().named_modules(), strict=True
    ):
        own._buffers.update(given._buffers)
    return model


def save_language(whole: Any, source: Path, to: Path) -> None:
    """Writes the language part as a model's directory, in the dtype of the files of the whole where that loses nothing, with all other files."""
    part = language_part(whole)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), torch.float32)
    lowered = {tensor.data_ptr(): tensor.to(dtype) for tensor in part.state_dict().values()}  # tied ones stay one
    state = {name: lowered[tensor.data_ptr()] for name, tensor in part.state_dict().items()}
    if not all(torch.equal(state[name].to(torch.float32), tensor) for name, tensor in part.state_dict().items()):
        state = dict(part.state_dict())
    part.save_pretrained(to, state_dict=state)
    copy_others(source, to)


def copy_others(source: Path, to: Path) -> None:
    """Copies the files of a model's directory that are neither weights nor its config."""
    for path in source.iterdir():
        weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copyfile(path, to / path.name)


def join(directory: Path, source: Path, dtype: torch.dtype, kept: Iterable[tuple[str, Tensor]] = ()) -> None:
    """Puts the trained language part in `directory` back into the whole model of `source`: `directory` then holds that, in `dtype`, and the tensors
    `kept`, which transformers does not load."""
    from transformers import AutoModelForCausalLM

    part = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    whole = load_whole(source)
    given, own = part.state_dict(), language_part(whole).state_dict()  # whose tensors are those of the whole
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(given[name])
    for path in directory.iterdir():
        if path.is_file():
            path.unlink()
    whole.to(dtype).save_pretrained(directory, state_dict={**whole.state_dict(), **dict(kept)})
    copy_others(source, directory)


# --- The features of images, and the proof


@torch.inference_mode()
def make(source: Path, home: Path, made: Path, images: Mapping[str, str]) -> None:
    """Fills the directory `made` with the language part of the model in `source`, and with the features of the images that lie in it by their
    digests. `images`: the digests, in the order of the table, and the place of each in the data, in words. The weights of the part lie once in `home`. Raises ConfigError."""
    whole, tokenizer = load_whole(source), load_tokenizer(source)
    for name, parameter in whole.named_parameters():
        if not parameter.isfinite().all():
            raise ConfigError(f"{name} in {source} has numbers that are not finite")
    if not (home / LANGUAGE / "config.json").exists():
        save_language(whole, source, made.parent / LANGUAGE)
        move_in(made.parent / LANGUAGE, home / LANGUAGE, "config.json")
    for path in (home / LANGUAGE).iterdir():
        (made / path.name).symlink_to(path)
    processor = _processor(source) if images else None
    see = FAMILIES[whole.config.model_type]
    layouts: dict[tuple[int, ...], int] = {}
    known, tables, first = {}, [], 0
    begun = told = time.monotonic()
    for number, (digest, where) in enumerate(images.items()):
        if (now := time.monotonic()) - told > TELL:
            told, left = now, (now - begun) / number * (len(images) - number)
            echo(f"features of {number:,} of {len(images):,} images, about {left / 60:.0f} minutes left")
        seen = see(processor, whole, tokenizer, _opened(made / FOLDER / digest, where))
        tokens = _tokens(tokenizer, seen.text)
        if tokens.count(whole.config.image_token_id) != len(seen.features):
            raise ConfigError(
                f"an image has {len(seen.features)} features, and its text has another number of tokens for them"
            )
        known[digest] = [first, layouts.setdefault(tokens, len(layouts))]
        tables.append(seen.tables())
        first += len(seen.features)
    none = {FEATURES: torch.zeros(0, whole.get_input_embeddings().embedding_dim)}
    joined = {name: torch.cat([table[name] for table in tables]) for name in tables[0]} if tables else none
    if len(joined[FEATURES]) and not joined[FEATURES].any():
        raise ConfigError(
            "the features of all images are zeros, so that it cannot tell one from another: a projection of its has no weights yet (a new Gemma 3 begins "
            "so); use a model that has learned to see, or give the projection random weights"
        )
    save_file(joined, made / FOLDER / ROWS)
    index = {
        "source": str(source),
        "placeholder": whole.config.image_token_id,
        "vocabulary": whole.get_input_embeddings().num_embeddings,
        "layouts": list(layouts),
        "images": known,
        "mark": _mark(whole, tokenizer),
        "ahead_in": kinds_that_see_ahead(whole.model.get_decoder()) if AHEAD in joined else [],
        "padding": whole.config.get_text_config().pad_token_id,
        "axes": axes_of(whole.model.get_decoder().rotary_emb, joined[FEATURES].shape[1]) if MOVES in joined else None,
    }
    (made / FOLDER / INDEX).write_text(json.dumps(index), encoding="utf-8")
    _prove(whole, made, tokenizer, "", None)
    for digest in {*list(images)[:1], *list(images)[-1:]}:
        _prove(
            whole,
            made,
            tokenizer,
            digest,
            see(processor, whole, tokenizer, _opened(made / FOLDER / digest, images[digest])),
        )


def _mark(whole: Any, tokenizer: Any) -> dict[str, Any] | None:
    """How the template marks the place of an image; None where that is by a placeholder."""
    if (around := AROUND.get(whole.config.model_type)) is None:
        return None
    begin = whole.config.boi_token_id
    return {"token": begin, "text": tokenizer.convert_ids_to_tokens(begin), "around": around}


def _processor(source: Path) -> Any:
    from transformers import AutoImageProcessor

    # Pillow's, which is there on every machine and gives equal pixels on all
    try:
        return AutoImageProcessor.from_pretrained(source, local_files_only=True, backend="pil")
    except Exception as error:  # each class raises its own kind
        raise ConfigError(_unprepared(source)) from error


def _unprepared(source: Path) -> str:
    try:
        kind = json.loads((source / "preprocessor_config.json").read_text(encoding="utf-8")).get("image_processor_type")
    except (OSError, ValueError):
        kind = None
    if kind is None:
        return "it has no preprocessor_config.json that says how images are prepared; add that of the model from which it was made"
    return (
        f"its images are prepared by {kind} (preprocessor_config.json), which transformers does not have with Pillow; remove image_processor_type there, "
        "and the one of its family is used"
    )


def _opened(path: Path, where: str) -> Any:
    from PIL import Image, ImageOps

    try:
        opened = Image.open(path)
        seen = ImageOps.exif_transpose(opened).convert("RGB")  # as transformers' load_image does
    except Exception as error:  # every format's reader raises its own kind
        raise ConfigError(
            f"{where} holds an image (sha256 {path.name[:12]}...) that cannot be read as one ({type(error).__name__}); remove its row, or save it as a PNG of usual size"
        ) from None
    if opened.mode[0] in "IF":  # Pillow cuts every value above 255 off
        raise ConfigError(
            f"{where} holds an image (sha256 {path.name[:12]}...) with more than eight bits a channel ({opened.mode}), of which a model would see hardly "
            "anything but white or black; save it with eight bits"
        )
    frames = getattr(opened, "n_frames", 1)
    if frames > 1 and opened.format != "MPO":  # cameras keep a smaller copy in those
        echo(f"{where} holds an image of {frames} frames: the model sees the first one alone")
    return seen


def _tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The tokens of an image's text, which must be the same wherever it stands."""
    encode = lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    tokens, before, behind = encode(text), encode("see"), encode("and say")
    if encode(f"see{text}and say") != (*before, *tokens, *behind):
        raise ConfigError("its tokenizer joins the text of an image with what stands beside it; this cannot be served")
    return tokens


@torch.inference_mode()
def _prove(whole: Any, made: Path, tokenizer: Any, digest: str, seen: Seen | None) -> None:
    """Raises ConfigError if the part in `made` does not give the logits of the whole."""
    part = language_part(whole)
    show_images(part, made)
    known = KnownImages(made)
    text = tuple(tokenizer("How many are there?", add_special_tokens=False)["input_ids"])
    tokens = (*text, *(known.tokens(digest) if digest else ()), *text)
    ids = torch.tensor([known.in_vocabulary(tokens)])
    expected = whole(input_ids=ids, **(whole_inputs(seen, ids, known.placeholder) if seen else {})).logits
    logits = part(input_ids=torch.tensor([tokens])).logits
    if not (logits - expected).norm() <= TOLERANCE * expected.norm():
        what = "a text" if seen is None else "a text with an image"
        raise ConfigError(
            f"its language part gives other numbers for {what} than the whole model (relative difference "
            f"{float((logits - expected).norm() / expected.norm()):.1g}), so it cannot be trained alone"
        )


def whole_inputs(seen: Seen, ids: Tensor, placeholder: int) -> dict[str, Tensor]:
    """Returns the arguments of the whole model's forward pass of `ids`, from those of its image."""
    types = {seen.types: (ids == placeholder).int()} if seen.types else {}
    return {**seen.inputs, **types}


def main(asked: str) -> int:
    """Called in the process that `images.py` starts. Returns its exit code; the last line on stderr says what is wrong."""
    given = json.loads(asked)
    try:
        make(Path(given["source"]), Path(given["home"]), Path(given["made"]), given["images"])
    except ConfigError as error:
        echo(str(error).replace("\n", " "), err=True)
        return 1
    return 0
