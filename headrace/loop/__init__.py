"""The loops of the controller, which run concurrently: rollouts, training steps and evaluation.

Read `parts.py` (the parts that the loops share), `pipeline.py` (the loops), `rolling.py` (from tickets to finished groups), `ledger.py`
(the five transitions of a ticket, each written, counted and reported), `outcomes.py` (the facts about a group), then
`saving.py` (checkpoints), `evaluation.py`, `identity.py`, `budgets.py`, `minutes.py`, `leaving.py`, `turns.py` and `utilisation.py`.
"""
