"""A tiny model that has learned to call a tool, so that an agent of any framework really calls it while it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.models.chat import ChatEncoder
from support.tool_chats import HERMES, save_tokenizer, tokens_of

CONTEXT = 1024
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ANSWER = "It is 5."
NUMBER = {"type": "number"}
PARAMETERS = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds two numbers", "parameters": PARAMETERS}}
"""The tool as Vercel's AI SDK declares it."""
WINDOW = 48
"""Tokens that each of its two layers looks back on, so that it need not learn from the whole prompt."""
ENOUGH, MOST_STEPS = 0.02, 600
"""The loss at which it has learned, and the steps after which it never will."""


def save_calling_model(directory: Path) -> Path:
    """Saves a model that answers a question with a call of the tool `add`, and the tool's result with a sentence."""
    encoder = ChatEncoder(save_tokenizer(directory, HERMES))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mistral",
        sliding_window=WINDOW,
        vocab_size=len(encoder.vocabulary()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=encoder.vocabulary()["<s>"],
        eos_token_id=encoder.vocabulary()["<|im_end|>"],
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    steps = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    lessons = [lesson for number in (4, 38, 95, 183) for lesson in _lessons(encoder, f"{number} + {number}?")]
    tokens = pad_sequence([tokens for tokens, _ in lessons], batch_first=True)
    labels = pad_sequence([labels for _, labels in lessons], batch_first=True, padding_value=-100)
    for _ in range(MOST_STEPS):
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        steps.step()
        steps.zero_grad()
        if loss.item() < ENOUGH:
            model.save_pretrained(directory)
            return directory
    raise AssertionError(f"it has not learned to call: loss {loss.item()}")


def _lessons(encoder: ChatEncoder, question: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns tokens and labels of both turns of a conversation."""
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    talk: list[dict[str, Any]] = [{"role": "user", "content": question}]
    answered = [
        *talk,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "name": "add", "content": "5"},
    ]
    found = []
    for messages, said in ((talk, CALL), (answered, ANSWER)):
        prompt, reply = (
            encoder.encode(encoder.write(messages, [TOOL], {}, False))[-2 * WINDOW :],
            tokens_of(f"{said}<|im_end|>"),
        )
        labels = [-100] * len(prompt) + reply
        found.append((torch.tensor([*prompt, *reply]), torch.tensor(labels)))
    return found
