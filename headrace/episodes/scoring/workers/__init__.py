"""Processes of reward functions. Read `reward_messages.py` (the wire), `reward_worker.py` (the process, which loads the functions) and `processes.py`
(many of them, which can be killed).
"""
