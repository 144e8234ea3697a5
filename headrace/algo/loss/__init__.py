"""The loss on the tokens of a microbatch.

Read `objective.py`, which composes a policy loss with its weights, then the parts: `corrections.py`, `selection.py`, `kl.py`,
`distill.py`; `aggregate.py` and `denominator.py` (the weight of a token in a step); `diagnostics.py`.
"""
