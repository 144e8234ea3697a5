"""How the state of processes is found out, without a chance to harm them.

Read `family.py` (which processes there are), `frames.py` (stacks from within, under the interpreter's lock), `outside.py`
(stacks from another process, for one that keeps that lock), then `monitor.py` (the process that watches the controller).
"""
