"""The heart: the loops of the controller, which run concurrently, and the rules that they follow. Here is no process and no setting's name:
a line of code in this folder touches ports (`core/protocols.py`) and facts.

The rules, as values: read `staleness.py` (C1 and its proof), `buffer.py` (tickets and slots), `partial.py` (what becomes of a rollout when new
weights come), `loop_plan.py` (the settings of the loops, and what follows from them) and `curriculum.py` (which prompt comes next; its settings in `curriculum_config.py`).

The loops: `pipeline.py` (begin here: all of them, from a drawn ticket to live weights), `ledger.py` (the five transitions of a ticket, each written,
counted and reported), `own_groups.py` (where groups come from), `openings.py` (which rollouts of several turns may begin), `evaluation.py` (held-out reward, and the proof that the served policy is the
trained one), `run_limits.py` (budgets, the time of a run, and its end) and `turns.py` (devices that several share, and how busy they are).

What outlives them: `checkpoints.py` (sealed directories of weights and state) and `recovery.py` (from checkpoint and journal back to state).
`assembly.py` joins everything into a pipeline, for runs, simulations and tests; `world/` does it in virtual time.
"""
