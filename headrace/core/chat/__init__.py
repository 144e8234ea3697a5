"""Chats with tools, as plain functions of text: nothing here knows a tokenizer, a server or an environment.

Read `messages.py` (messages and tools in OpenAI's format, and what a chat template is given), `message_images.py` (images in messages), `tool_calls.py` (how the
families of models write a tool call, and grammars of those that are JSON), `token_text.py` (tokens become text while they arrive), `reading.py` (text becomes
thinking, content and calls, whole or while it arrives; the format of calls that a chat template uses).
"""
