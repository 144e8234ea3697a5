"""An algorithm as a value: which advantage, which loss, which weights on it.

Read `recipes.py` (the table of algorithms and of losses), `config.py` with `tables.py` (the settings that replace a recipe's values), `policy/` (the policy
losses, each a value), `advantages.py` and `advantage/` (rewards become training rows), `loss/` (what the trainer calls on every microbatch); then `noise.py`, `caveats.py`, `earlier.py` and
`load.py`.
"""
