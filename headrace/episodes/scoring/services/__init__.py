"""Scorers behind HTTP: services that return rewards, and language models that judge.

Read `config.py` (their settings), `endpoint.py` (one URL: attempts, pauses between them, deadline, token; a service behind it) and `judge.py` (what a
judge is asked, and how its answer is read).
"""
