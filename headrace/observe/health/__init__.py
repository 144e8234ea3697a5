"""How the state of processes is found out, without a chance to harm them, and what is done with one that hangs.

Read `waits.py` (who waits for whom), `family.py` (which processes there are), `patience.py` (deadlines on a busy machine),
`own_stacks.py` (stacks from within, under the interpreter's
lock), `outside.py` (stacks from another process, for one that keeps that lock), `stacks.py` (either, of a worker), `snapshot.py` (all
of it at one moment), `status.py` (`status.json`), `watchdog.py` (warns, then ends the run) and `monitor.py` (the process that watches
the controller).
"""
