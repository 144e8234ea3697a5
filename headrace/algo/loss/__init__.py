"""The loss on the tokens of a microbatch.

Read `objective.py` (the parts composed: a policy loss and what weighs it), the parts `corrections.py`, `selection.py`, `kl.py` and
`distill.py`; `aggregate.py` and `denominator.py` (the weight of a token in a step), `diagnostics.py`.
"""
