"""Teachers as a stage of scoring. Read `config.py`, `stage.py` (log-probs of the tokens that the policy sampled), `vocabulary.py`
(whether two models give a token the same meaning).
"""
