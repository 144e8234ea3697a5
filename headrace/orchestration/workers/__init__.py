"""Engine and trainer as processes: both ends of the wire between them and the controller.

Read `wire.py` (frames), `messages.py` (what starts a worker), `process.py` (a worker, seen from the controller), `clients.py`
(the ports `Engine` and `Trainer` over it); in the worker `worker.py`, `build.py` (its concrete classes), `answers.py` and
`engine_loop.py`.
"""
