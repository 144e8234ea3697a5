"""The routes. Read `generate.py` (tokens in, tokens out), `openai.py` (text), `control.py` (weights, pauses, health)."""
