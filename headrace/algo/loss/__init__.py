"""The loss on the tokens of a microbatch.

Read `tokens.py` (what every loss sees), `losses.py`, `objective.py` (the parts composed), the parts `corrections.py`, `selection.py`,
`kl.py` and `distill.py`; `aggregate.py` and `denominator.py` (the weight of a token in a step), `diagnostics.py`, `user.py`.
"""
