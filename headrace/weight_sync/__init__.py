"""Carries weights from the trainer to engines.

Read `packed.py` (the buffer that every transport fills, and its fingerprint), `slots.py` (the memory of such buffers), `kind.py` (what a transport states about itself), `config.py` (the
settings, and the choice of a transport), `transport.py` (the table of transports), `shared_memory.py` (both ends of one), `fetching.py` (the two ends of
those that engines fetch from), `sockets.py` (their messages), `ranges.py` (a buffer in parts) with `rank_digests.py` (its fingerprint), `relays.py` (engines that send to engines), `tcp_server.py`, `tcp_engine.py` and `tcp.py`, `http_ranges.py` and `files.py` (which do),
`broadcast.py` with `round_messages.py` (the words of both ends) and `broadcast_rounds.py` (the process group, and the trainer's end), and `cuda_ipc.py`
with `device_memory.py` (those by which the trainer sends), `delta/` (the difference of two
versions), `unprepared.py` (the end of a server that was started before the run) with `machine_memory.py` (whose processes on a machine share what they have
fetched), `in_vllm/` (the end that runs in vLLM), `directory.py` (weights that never change, read from a model's directory, and adapters
that peft saved).
"""
