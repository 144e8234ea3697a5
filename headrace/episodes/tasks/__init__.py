"""The sources of prompts.

Read `task_kinds.py` (the table of kinds, with the facts about each), `config.py`, `prompts.py` (a question becomes a prompt), `conversations.py` (the
forms of a prompt in a row), `read.py` (files) and `rows.py` (rows of files or from Python, and their images), `demonstrations.py` (questions with
answers, for a warm start), `reasoning_gym.py` (generated problems), `seeds.py` (seeds alone, for games).
"""
