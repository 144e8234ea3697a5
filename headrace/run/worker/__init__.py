"""Worker processes, and the connection between them and the controller.

The controller's half: read `wire.py` (frames and channels), `worker_messages.py` (the start messages), `connected.py` (a worker behind a
stream), `launch/` (workers on this machine), `joining/` (workers that connect over TCP), `user_hosts/` (those of them that run the user's code), `placed/` (those that a cluster starts) and `fake.py`
(one without a process). The worker's half: `worker.py`, `fork_server.py` (the process that workers are forked from), `build.py` (its concrete
classes), `rank_senders.py` (how ranks publish), `answers.py`, `engine_loop.py`, `shared_calls.py` (a trainer that clients share) and
`first_difference.py` (the first layer in which engine and trainer differ).
"""
