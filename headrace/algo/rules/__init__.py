"""Rules that take tokens out of the policy loss if the trainer's policy is no longer the one that sampled them. Each is a
value with its threshold.

Read `rule.py` (what a rule has), then the rules: `veto.py`, `kpop.py`, `opsm.py`; `table.py` lists them and makes their settings.
"""
