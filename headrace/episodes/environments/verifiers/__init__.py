"""Tasksets of `verifiers` (0.4) in an interpreter of their own, because verifiers pins versions of packages
that others use.

Read `verifiers_package.py` (the interpreter that has it), `taskset_player.py` (the program that runs there, without headrace: it opens
the environment and plays rollouts at the address of each), `taskset_process.py` (this program, seen from here),
`taskset_environment.py` (a rollout).
"""
