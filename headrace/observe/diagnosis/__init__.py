"""What the numbers of a run mean, in sentences.

Read `troubles.py` (how much failed), `verdicts.py` (whether the contracts held), `advice.py` (which setting to change).
"""
