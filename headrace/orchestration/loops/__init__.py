"""The loops of the controller: rollouts, training steps and evaluation, at once.

Read `parts.py` (what the loops share), `pipeline.py` (the loops), `rolling.py` (tickets to finished groups), `ledger.py` (the five
transitions of a ticket, each written, counted and reported), `outcomes.py` (what is reported of a group), then
`evaluation.py`, `identity.py`, `budgets.py`, `minutes.py`, `leaving.py`, `turns.py` and `utilisation.py`.
"""
