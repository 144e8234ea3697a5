"""The routes. Read `generate.py` (tokens in, tokens out), `openai.py` (text) with `completion_text.py` (text and tool calls of a completion)
and `said_logprobs.py`, `shared_formats.py` (text in the formats that the gateway of agents has too), `control.py` (weights, pauses, health)."""
