"""The routes. Read `generate.py` (tokens in, tokens out), `openai.py` (text) with `completion_text.py` (text and tool calls of a completion)
and `said_logprobs.py`, `control.py` (weights, pauses, health)."""
