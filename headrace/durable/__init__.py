"""The files that recovery reads: after a kill at any byte they hold enough to go on from.

Read `files.py` (appended lines and replaced files), `journal.py` (what happened to every ticket), `pass_log.py` (what was generated,
forward pass by forward pass), `spelling.py` (tokens as journal text).
"""
