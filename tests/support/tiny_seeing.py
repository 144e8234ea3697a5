"""Tiny models that see, one of each family, with tokenizer and processor, and images for them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.models.images import FOLDER, ImageFile, KnownImages
from headrace.models.vision import make

FAMILIES = ("idefics3", "internvl", "llava", "smolvlm")
TILES = [f"<row_{row}_col_{col}>" for row in (1, 2, 3) for col in (1, 2, 3)]
SPECIAL = ["<end>", "<fake_token_around_image>", "<image>", "<global-img>", "<img>", "</img>", "<IMG_CONTEXT>", *TILES]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}<end>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "idefics3": (
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": False},
    ),
    "smolvlm": ("SmolVLMImageProcessorPil", {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}),
    "internvl": ("GotOcr2ImageProcessorPil", {"size": {"height": 32, "width": 32}, "min_patches": 1, "max_patches": 4}),
    "llava": ("LlavaImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}),
}
_saved = TemporaryDirectory(prefix="headrace-seeing-")


def placeholder(family: str) -> str:
    return "<IMG_CONTEXT>" if family == "internvl" else "<image>"


def tokenizer(family: str) -> Any:
    letters = [*map(chr, range(32, 127)), "\n"]
    words = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="?"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<pad>", additional_special_tokens=SPECIAL
    )
    made.chat_template = TEMPLATE.replace("IMAGE", placeholder(family))
    return made


def seeing(family: str) -> Any:
    """A model in float32 and eval mode, with biases and norms that differ from 0 and 1."""
    torch.manual_seed(3)
    words = tokenizer(family)
    text = {
        "model_type": "qwen2" if family == "internvl" else "llama",
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(words),
        "max_position_embeddings": 256,
        "pad_token_id": words.pad_token_id,
        "eos_token_id": words.eos_token_id,
        "bos_token_id": None,
    }
    sees: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    image = words.convert_tokens_to_ids(placeholder(family))
    config: Any
    if family == "llava":
        sees |= {"model_type": "siglip_vision_model", "vision_use_head": False}
        more = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
        config = transformers.LlavaConfig(vision_config=sees, text_config=text, image_token_id=image, **more)
    elif family == "internvl":
        sees |= {"image_size": [32, 32], "patch_size": [8, 8]}
        config = transformers.InternVLConfig(vision_config=sees, text_config=text, image_token_id=image)
    else:
        kind = {"idefics3": transformers.Idefics3Config, "smolvlm": transformers.SmolVLMConfig}[family]
        more = {"scale_factor": 2, "pad_token_id": words.pad_token_id, "tie_word_embeddings": family == "smolvlm"}
        config = kind(vision_config=sees, text_config=text, image_token_id=image, **more)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@cache
def saved(family: str) -> Path:
    directory = Path(_saved.name) / family
    seeing(family).save_pretrained(directory)
    tokenizer(family).save_pretrained(directory)
    processor(family).save_pretrained(directory)
    return directory


def picture(seed: int, height: int = 32, width: int = 32) -> ImageFile:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, format="PNG")
    return ImageFile(written.getvalue())


def made(family: str, images: Sequence[ImageFile]) -> Path:
    """The directory that engine and trainer load, made in this process."""
    home = Path(tempfile.mkdtemp(dir=_saved.name))
    directory = home / "work" / "model"
    (directory / FOLDER).mkdir(parents=True)
    for image in images:
        (directory / FOLDER / image.digest).write_bytes(image.data)
    make(saved(family), home, directory, {image.digest: image.where for image in images})
    return directory


def prompt(family: str, directory: Path, images: Sequence[ImageFile], text: str = "How many?") -> tuple[int, ...]:
    """The tokens of a prompt whose images stand before its text."""
    known = KnownImages(directory)
    shown = [token for image in images for token in known.tokens(image.digest)]
    return (*shown, *tokenizer(family)(text, add_special_tokens=False)["input_ids"])


def opened(image: ImageFile) -> Any:
    return Image.open(io.BytesIO(image.data)).convert("RGB")


def processor(family: str, **options: Any) -> Any:
    name, sizes = PROCESSORS[family]
    return getattr(transformers, name)(**{**sizes, **options})


def inputs(family: str, images: Sequence[ImageFile]) -> dict[str, torch.Tensor]:
    """What the model's own processor makes of the images of one prompt, for transformers' own forward pass."""
    given = list(map(opened, images))
    more: dict[str, Any] = {"crop_to_patches": True} if family == "internvl" else {}
    nested = [given] if family in ("idefics3", "smolvlm") else given
    found = dict(processor(family)(images=nested, return_tensors="pt", **more))
    return {key: value for key, value in found.items() if key.startswith("pixel")}
