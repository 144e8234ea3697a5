"""Servers that a run starts, on its own machine.

Read `installed.py` (the packages that an interpreter has), `server_guard.py` (the parent of the server, which ends all of it), `server_process.py` (the words
that start a server, its life seen from the run, and why it ended, from its log).
"""
