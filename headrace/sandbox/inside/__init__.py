"""The work of a process that was forked for a call.

Read `confine.py` (gives up its rights), `solution.py` (the code), `tester.py` (the test, in a process of its own), `plain.py` (values between
the two) and `json_frames.py`.
"""
