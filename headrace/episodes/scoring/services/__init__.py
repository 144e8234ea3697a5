"""Scorers behind HTTP: services that return rewards, and language models that judge.

Read `config.py` (their settings), `endpoint.py` (one URL: attempts, pauses between them, deadline, token), `http_post.py` (one attempt),
`service.py` (a service's request and answer), `judge.py` and `judge_answers.py` (what a judge is asked, and how its answer is read).
"""
