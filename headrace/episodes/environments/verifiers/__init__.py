"""Tasksets of `verifiers` (0.4) in an interpreter of their own, because verifiers pins versions of packages
that others use.

Read `taskset_player.py` (the program that runs there, without headrace: it opens the environment and plays rollouts at the address of each),
`taskset_process.py` (this program, seen from here), `taskset_environment.py` (a rollout, and the interpreter that has the package).
"""
