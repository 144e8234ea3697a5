"""The program of a worker process: it builds an engine or a trainer from the messages of its run, and answers calls.

Read `worker_messages.py` (the start messages), `step_messages.py` (a step on its way to the ranks), `worker.py` (with a trainer that clients
share), `fork_server.py` (the process that workers are
forked from), `build.py` (the concrete classes, and how ranks publish), `engine_loop.py`, `own_server.py` (a server that is started where it is used) and `server_loop.py` (a worker that has one),
and `first_difference.py` (the
first layer in which engine and trainer differ).
"""
