"""Sentences about the numbers of a run.

Read `troubles.py` (how much failed), `verdicts.py` (whether the contracts held), `advice.py` (which setting to change), `deliveries.py` (what
travels for a version of the weights).
"""
