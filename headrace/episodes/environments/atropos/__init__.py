"""Environments of Atropos (`environment.kind = "atropos"`): they draw their own problems, sample from the run, and post groups that they have scored.

Read `open_rollouts.py` (what they send, the rollouts that they may play, and those whose tokens a posted group has) and `atropos_routes.py` (what they
ask for and sample from). `atropos_environment.py` joins them.
"""
