"""The health of a run's processes: their state is inspected without any risk to them, and those that hang are ended.

Read `family.py` (the worker processes, none of which outlives the controller), `patience.py` (deadlines on a busy machine), `stacks.py`
(stacks of the own process, under the interpreter's lock, and of another one, even one that keeps that lock), `owned_directory.py`
(no temporary directory outlives the controller), `user_prints.py` (bounds what the user's code prints),
`live_status.py` (everything at one moment, and `status.json`), `usage.py` (cores and memory), `watchdog.py`
(warns, then ends the run) and `monitor.py` (the process that watches the controller).
"""
