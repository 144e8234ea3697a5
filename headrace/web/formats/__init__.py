"""Formats of answers that the gateway of agents and `headrace serve` share. None of them knows where a turn is sampled.

Read `followed_turn.py` (a turn as all formats read it), then OpenAI's responses (`responses.py`: items become messages and back, answers whole or as
events, and what `previous_response_id` names) and Anthropic's messages (`anthropic_messages.py`).
"""
