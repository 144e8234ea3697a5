"""Chooses the prompt that is drawn next, from what the groups of each prompt have shown so far.

Read `config.py`, `observations.py` (what a record says about a prompt), `beliefs.py` (what is known of a prompt), `source.py` (the port, and
the task's own order) and `chooser.py` (the choice among candidates). Everything follows from the task's order and the journal's
records in theirs.
"""
