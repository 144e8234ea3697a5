"""Launchers that start workers on this machine.

Read `local.py` (a process: environment, log, start, end) and `local.py` (every worker is a new interpreter). Then read `forking.py` (a fork
whose child belongs to the caller's parent), `local.py` (such a child, seen from the controller), `forking.py` (the process
that has the libraries loaded and forks; its program is `run/worker/fork_server.py`) and `forking.py` (workers that it forks).
"""
