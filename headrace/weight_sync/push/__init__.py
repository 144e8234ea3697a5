"""Transports by which the trainer's process pushes weights.

A broadcast: read `round_messages.py` (the words of both ends), `keys.py` (the store through which a group meets), `buckets.py` (a process group, and
what it carries), `rounds.py` (the trainer's end) and `broadcast.py` (the transport, and the engine's end). Between processes on one GPU: read
`device_memory.py` (memory with handles, and its stand-in on a CPU) and `cuda_ipc.py` (the transport).
"""
