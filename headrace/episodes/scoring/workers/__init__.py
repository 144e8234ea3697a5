"""Threads and processes for reward functions. Read `reward_messages.py` (the wire), `reward_worker.py` (the process) with `load.py`, `processes.py` (many of them,
which can be killed), `spread.py` (on several machines), `threads.py` (functions from Python, which cannot).
"""
