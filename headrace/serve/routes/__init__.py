"""The routes. Read `generate.py` (tokens in, tokens out), `text.py` (text in the formats of OpenAI and Anthropic), `control.py` (weights,
pauses, health).
"""
