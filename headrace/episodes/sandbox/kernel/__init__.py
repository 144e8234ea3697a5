"""Linux's means of isolation, without privileges.

Read `syscalls.py`, `landlock.py` (files), `seccomp.py` (system calls) with `thread_gate.py` (threads), `namespaces.py` (a directory of limited size, no network).
"""
