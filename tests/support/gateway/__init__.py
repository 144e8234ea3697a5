"""Agents that talk with the gateway: `gateway_agent.py`, `written_turns.py`."""
