"""The routes. Read `tokens.py` (tokens in, tokens out), `openai.py` (text) with `answers.py` (text and tool calls of a completion),
`control.py` (weights, pauses, health)."""
