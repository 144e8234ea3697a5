"""The heart: the loops of the controller, which run concurrently, and the rules that they follow. Here is no process and no setting's name:
a line of code in this folder touches ports (`core/protocols.py`) and facts.

The rules, as values: read `staleness.py` (C1 and its proof), `buffer.py` (tickets and slots), `partial.py` (what becomes of a rollout when new
weights come), `loop_plan.py` (the settings of the loops, and what follows from them) and `curriculum/` (which prompt comes next).

The loops: `parts.py` (what they share), `pipeline.py` (begin here), `rolling.py` (from tickets to finished groups), `ledger.py` (the five
transitions of a ticket, each written, counted and reported), `outcomes.py` (the facts about a group), `group_source.py` (where groups come
from), `own_groups.py` (this process's engine, environments and scorers), `suspects.py` (tickets that end the processes that work on them),
`evaluation.py`, `identity.py`, `budgets.py`, `minutes.py` and `allowance.py` (the steps that still fit), `leaving.py`, `turns.py` and
`utilisation.py`.

What outlives them: `saving.py` (checkpoints beside training), `checkpoints.py` (the sealed directories of weights and state), `snapshots.py`
(the controller's state), `changed_settings.py` (what goes on after a change), `recovery.py` (from checkpoint and journal back to state).
`assembly.py` joins everything into a pipeline, for runs, simulations and tests; `world/` does it in virtual time.
"""
