"""Everything that starts, hears, watches or ends a process. A line of code here knows bytes and pids, never a rollout.

Read `frames.py` (bytes on a stream), `wire.py` (calls and channels), `wire.py` (a worker behind a stream), `wire.py` (the worker's reply
to a call), `process_end.py` (how a process is ended, and how that is said), `process_end.py` (how often a process may die), `asked_process.py` (a
process that runs the user's code and is asked over its pipes), `obeying.py` (the inside of that process), then `launch/` (workers on this machine),
`joining/` (workers that connect over TCP), `placed/` (workers that a cluster starts) and `health/` (processes that hang or die). Where workers
may run is `worker_place.py` (the facts that a place states about itself), `places.py` (the table) and `orchestration_config.py` (the settings).
"""
