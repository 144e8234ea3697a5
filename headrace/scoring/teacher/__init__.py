"""Teachers as a stage of scoring. Read `config.py`, `stage.py` (log-probs for what the policy sampled), `vocabulary.py` (whether
two models mean the same by a token).
"""
