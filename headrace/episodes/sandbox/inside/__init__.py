"""The work of a process that was forked for a call.

Read `confine.py` (gives up its rights) and `solution.py` (the code). A test has a process of its own, `tester.py`, for which the code is what
`remote_code.py` makes of it, or runs once more beside the code; `answering.py` is the other end, and `plain_values.py` are the values between the
two. `isolation_trial.py` is no part of a call: it is the code of the trial.
"""
