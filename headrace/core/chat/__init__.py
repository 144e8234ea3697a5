"""Chats with tools, as plain functions of text: nothing here knows a tokenizer, a server or an environment.

Read `messages.py` (messages and tools in OpenAI's format, and what a chat template is given of them), `rendering.py` (what it is given beside
them), `formats.py` (how the families of models write a tool call) with `gemma_calls.py` and `qwen_calls.py` (those that are not JSON) and `call_grammars.py` (grammars of those that are), `streamed_text.py`
(tokens become text while they arrive), `token_bytes.py` (one token may be a part of a character), `thinking.py` (thinking and answer), `reading.py` (text becomes content and calls, whole or while it arrives), `probing.py` (the format that a chat template uses).
"""
