"""Worker processes: both ends of the wire between them and the controller.

At the controller read `wire.py` (frames and channels), `messages.py` (what starts a worker), `connected.py` (a worker at the end of
a stream), `local.py` (one of this machine), `dial_in.py` (one that connects over TCP), `fake.py` (one without a process); in the
worker `worker.py`, `build.py` (its concrete classes), `answers.py`, `engine_loop.py` and `first_difference.py`
(the layer in which engine and trainer part).
"""
