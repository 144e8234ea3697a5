"""Draws the images of this recipe, and makes the model: a tiny SmolVLM, Qwen2.5-VL or Gemma 3 with random weights, of which the language part learns to count.

python make_dots.py                 writes images/, dots.jsonl and model/ beside this file
python make_dots.py qwen2_5_vl      or gemma3
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLImageProcessorPil,
    SmolVLMConfig,
    SmolVLMImageProcessorPil,
)

HERE = Path(__file__).parent
SIDE, CELL, MOST, COUNT = 32, 8, 5, 2000
"""Pixels of an image and of a cell, the most dots, and the number of images."""
SPECIAL = {
    "smolvlm": ["<end>", "<fake_token_around_image>", "<image>", "<global-img>"],
    "qwen2_5_vl": ["<end>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
    "gemma3": ["<end>", "<start_of_image>", "<image_soft_token>", "<end_of_image>"],
}
SHOWN = {
    "smolvlm": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
}
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{% for part in message.content %}{{ 'SHOWN' if part.type == 'image' else part.text }}"
    "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def draw(place: random.Random, dots: int) -> Image.Image:
    """Each dot lies in a cell of its own, at any place in it, in any bright colour."""
    image = Image.new("RGB", (SIDE, SIDE), tuple(place.randrange(40) for _ in range(3)))
    pen = ImageDraw.Draw(image)
    for cell in place.sample(range((SIDE // CELL) ** 2), dots):
        x, y = cell % (SIDE // CELL) * CELL + place.randrange(3), cell // (SIDE // CELL) * CELL + place.randrange(3)
        pen.ellipse((x, y, x + 5, y + 5), fill=tuple(place.randrange(180, 256) for _ in range(3)))
    return image


def make_images() -> None:
    place = random.Random(0)
    (HERE / "images").mkdir(exist_ok=True)
    rows = []
    for number in range(COUNT):
        path = f"images/{number:04}.png"
        draw(place, 1 + number % MOST).save(HERE / path)
        rows.append({"prompt": "dots?", "image": path})
    (HERE / "dots.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(kind: str) -> None:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(letters, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<pad>", additional_special_tokens=SPECIAL[kind]
    )
    tokenizer.chat_template = TEMPLATE.replace("SHOWN", SHOWN[kind])
    torch.manual_seed(0)
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 128,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config, processor = {"smolvlm": _smolvlm, "qwen2_5_vl": _qwen, "gemma3": _gemma}[kind](tokenizer, text)
    model = AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters():
        if "mm_input_projection" in name:  # zeros otherwise, and all images would look alike
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(HERE / "model")
    tokenizer.save_pretrained(HERE / "model")
    processor.save_pretrained(HERE / "model")


def _smolvlm(tokenizer: PreTrainedTokenizerFast, text: dict[str, Any]) -> tuple[Any, Any]:
    config = SmolVLMConfig(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": CELL,
        },
        text_config={"model_type": "llama", **text},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=1,
    )
    sizes = {"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}, "do_image_splitting": False}
    return config, SmolVLMImageProcessorPil(**sizes)


def _qwen(tokenizer: PreTrainedTokenizerFast, text: dict[str, Any]) -> tuple[Any, Any]:
    number = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "depth": 1,
            "num_heads": 4,
            "patch_size": CELL // 2,
            "spatial_merge_size": 2,
            "out_hidden_size": text["hidden_size"],
            "fullatt_block_indexes": [0],
        },
        text_config={
            **text,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
        image_token_id=number("<|image_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
    )
    return config, Qwen2VLImageProcessorPil(patch_size=CELL // 2, merge_size=2, min_pixels=SIDE**2, max_pixels=SIDE**2)


def _gemma(tokenizer: PreTrainedTokenizerFast, text: dict[str, Any]) -> tuple[Any, Any]:
    number = tokenizer.convert_tokens_to_ids
    config = Gemma3Config(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": CELL,
            "vision_use_head": False,
        },
        text_config={
            **text,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 12,  # shorter than an image
        },
        mm_tokens_per_image=(SIDE // CELL) ** 2,
        boi_token_id=number("<start_of_image>"),
        eoi_token_id=number("<end_of_image>"),
        image_token_id=number("<image_soft_token>"),
    )
    return config, Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})


if __name__ == "__main__":
    make_images()
    make_model(sys.argv[1] if len(sys.argv) > 1 else "smolvlm")
