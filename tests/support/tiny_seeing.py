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
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from headrace.models.images import FOLDER, ImageFile, KnownImages
from headrace.models.vision import make

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
GEMMA = ("gemma3", "gemma4")
FAMILIES = ("idefics3", "internvl", "llava", "smolvlm", *QWEN, *GEMMA)
TILES = [f"<row_{row}_col_{col}>" for row in (1, 2, 3) for col in (1, 2, 3)]
SPECIAL = ["<end>", "<fake_token_around_image>", "<image>", "<global-img>", "<img>", "</img>", "<IMG_CONTEXT>", *TILES]
GEMMA_SPECIAL = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
SPECIAL += [*GEMMA_SPECIAL.values(), "<video>", "<audio>"]
SPECIAL += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
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
    "gemma3": ("Gemma3ImageProcessorPil", {"size": {"height": 32, "width": 32}}),
    "gemma4": ("Gemma4ImageProcessorPil", {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}),
    **dict.fromkeys(
        QWEN, ("Qwen2VLImageProcessorPil", {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024})
    ),
}
_saved = TemporaryDirectory(prefix="headrace-seeing-")


def placeholder(family: str) -> str:
    if family in GEMMA:
        return GEMMA_SPECIAL["image_token"]
    return "<IMG_CONTEXT>" if family == "internvl" else "<|image_pad|>" if family in QWEN else "<image>"


def tokenizer(family: str) -> Any:
    """One token for each letter; in the families of Gemma, one for several line ends."""
    lines = ["\n" * count for count in range(1, 6 if family in GEMMA else 2)]
    letters = [*map(chr, range(32, 127)), *lines]
    words = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="?"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    if family in GEMMA:
        words.pre_tokenizer = pre_tokenizers.Split(Regex("\\n+|[^\\n]"), "isolated")
    named = GEMMA_SPECIAL if family in GEMMA else {}
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<pad>", additional_special_tokens=SPECIAL, **named
    )
    mark = GEMMA_SPECIAL["boi_token"] if family == "gemma3" else placeholder(family)
    made.chat_template = TEMPLATE.replace("IMAGE", mark)
    return made


def _qwen(family: str, words: Any, text: dict[str, Any]) -> Any:
    """A config. Its sections of axes are of different sizes, so that one in the place of another shows."""
    number = words.convert_tokens_to_ids
    sees: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
    wide = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": text["hidden_size"]}
    kind = transformers.AutoConfig.for_model(family)
    sees |= {"embed_dim": 32, "hidden_size": text["hidden_size"], "mlp_ratio": 2} if family == "qwen2_vl" else wide
    if family == "qwen2_5_vl":
        sees |= {"window_size": 16, "fullatt_block_indexes": [1]}
    if family.startswith("qwen3"):
        sees |= {"num_position_embeddings": 16}
    if family.startswith("qwen3_vl"):
        sees |= {"deepstack_visual_indexes": [0, 1]}
    text = {name: value for name, value in text.items() if name != "model_type"}
    text |= {
        "head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [3, 2, 1]},
    }
    if family.endswith("moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
        text |= {"shared_expert_intermediate_size": 24}
    if family.startswith("qwen3_5"):
        text |= {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_value_heads": 4}
        text |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        text["rope_parameters"] |= {"partial_rotary_factor": 0.75}
    special = {"vision_start_token_id": number("<|vision_start|>"), "vision_end_token_id": number("<|vision_end|>")}
    special |= {"image_token_id": number("<|image_pad|>"), "video_token_id": number("<|video_pad|>")}
    return type(kind)(vision_config=sees, text_config=text, tie_word_embeddings=False, **special)


def _gemma(family: str, words: Any, text: dict[str, Any], sees: dict[str, Any]) -> Any:
    """A config. An image is longer than a window; of Gemma 4, the last two layers have the keys of the first two."""
    number = words.convert_tokens_to_ids
    special = {
        "boi_token_id": number("<start_of_image>"),
        "eoi_token_id": number("<end_of_image>"),
        "image_token_id": number("<image_soft_token>"),
    }
    text = {name: value for name, value in text.items() if name != "model_type"}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * (1 if family == "gemma3" else 2)}
    text |= {"num_hidden_layers": len(text["layer_types"]), "head_dim": 12, "sliding_window": 12}
    text |= {"max_position_embeddings": 2048}
    if family == "gemma3":
        text |= {"query_pre_attn_scalar": 12}
        sees |= {"model_type": "siglip_vision_model", "vision_use_head": False}
        return transformers.Gemma3Config(vision_config=sees, text_config=text, mm_tokens_per_image=16, **special)
    text |= {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 6, "global_head_dim": 16}
    text |= {"vocab_size_per_layer_input": text["vocab_size"], "num_kv_shared_layers": 2}
    sees = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    sees |= {"num_key_value_heads": 4, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64}
    special |= {"video_token_id": number("<video>"), "audio_token_id": number("<audio>")}
    return transformers.Gemma4Config(vision_config=sees, text_config=text, audio_config=None, **special)


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
    if family in QWEN:
        config = _qwen(family, words, text)
    elif family in GEMMA:
        config = _gemma(family, words, text, sees)
    elif family == "llava":
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
        if family in (
            *QWEN,
            *GEMMA,
        ):  # a placeholder is never the best token: transformers would take it for another feature
            model.get_output_embeddings().weight[image] = 0
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
    words = tokenizer(family)
    around = words.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"]) if family in QWEN else []
    shown = [token for image in images for token in (*around[:1], *known.tokens(image.digest), *around[1:])]
    return (*shown, *words(text, add_special_tokens=False)["input_ids"])


def opened(image: ImageFile) -> Any:
    return Image.open(io.BytesIO(image.data)).convert("RGB")


def processor(family: str, **options: Any) -> Any:
    name, sizes = PROCESSORS[family]
    return getattr(transformers, name)(**{**sizes, **options})


def inputs(family: str, images: Sequence[ImageFile], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the model's own processor makes of the images of one prompt, for transformers' own forward pass of `ids`."""
    given = list(map(opened, images))
    more: dict[str, Any] = {"crop_to_patches": True} if family == "internvl" else {}
    nested = [given] if family in ("idefics3", "smolvlm") else given
    found = dict(processor(family)(images=nested, return_tensors="pt", **more))
    if family in QWEN:
        more = {"mm_token_type_ids": (ids == tokenizer(family).convert_tokens_to_ids(placeholder(family))).int()}
        return {**found, **more}
    if family in GEMMA:
        types = (ids == tokenizer(family).convert_tokens_to_ids(placeholder(family))).int()
        found["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = types
        return {key: value for key, value in found.items() if not key.startswith("num_")}
    return {key: value for key, value in found.items() if key.startswith("pixel")}
