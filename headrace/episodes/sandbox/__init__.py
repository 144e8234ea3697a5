"""Code that a model has written, run where it can do no harm: one confined process for each call.

Read `config.py`, `sandbox_limits.py`, `sandbox.py` (calls, and their results), `zygote.py` (the process that forks for each call) with
`attending.py` (waits for the end of a call, and watches its private directory); then `inside/`, the work of a forked process. `isolation.py` finds out
what this machine can do; `tool.py` is the sandbox of one process, and its tool. `kernel/` has what Linux offers.
"""
