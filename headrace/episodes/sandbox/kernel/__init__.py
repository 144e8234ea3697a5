"""Linux's means of isolation, without privileges.

Read `syscalls.py` (system calls, Landlock for files, namespaces for a directory of limited size without a network), then `seccomp.py` (which calls
are let through, and how many threads).
"""
