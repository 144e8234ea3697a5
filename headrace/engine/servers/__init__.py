"""Servers that a run starts, on its own machine.

Read `installed.py` (the packages that an interpreter has), `commands.py` (the words and variables that start a server), `server_guard.py` (the parent of the
server, which ends all of it), `server_log.py` (why it ended, from its log), `server_process.py` (its life, seen from the run).
"""
