"""Draws the images of this recipe, and makes the model: a tiny SmolVLM with random weights, of which the language part learns to count.

python make_dots.py            writes images/, dots.jsonl and model/ beside this file
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMImageProcessorPil

HERE = Path(__file__).parent
SIDE, CELL, MOST, COUNT = 32, 8, 5, 2000
"""Pixels of an image and of a cell, the most dots, and the number of images."""
SPECIAL = ["<end>", "<fake_token_around_image>", "<image>", "<global-img>"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}"
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


def make_model() -> None:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(letters, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<pad>", additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = SmolVLMConfig(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": CELL,
        },
        text_config={
            "model_type": "llama",
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
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=1,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(HERE / "model")
    tokenizer.save_pretrained(HERE / "model")
    SmolVLMImageProcessorPil(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    ).save_pretrained(HERE / "model")


if __name__ == "__main__":
    make_images()
    make_model()
