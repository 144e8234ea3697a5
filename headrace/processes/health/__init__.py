"""The health of a run's processes: their state is inspected without any risk to them, and those that hang are ended.

Read `family.py` (the worker processes), `patience.py` (deadlines on a busy machine), `stacks.py`
(stacks of the own process, under the interpreter's lock), `stacks.py` (stacks of another process, even one that keeps that lock),
`stacks.py` (stacks of a worker, in either way), `orphans.py` (no process outlives the controller), `owned_directory.py`
(nor does a temporary directory), `user_prints.py` (bounds what the user's code prints),
`live_status.py` (everything at one moment), `live_status.py` (`status.json`), `usage.py` (cores and memory), `watchdog.py`
(warns, then ends the run) and `monitor.py` (the process that watches the controller).
"""
