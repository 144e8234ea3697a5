"""Teachers as a stage of scoring. Read `config.py`, `stage.py` (log-probs of the tokens that the policy sampled), `text_teacher.py`
(rewards of models that read text), `vocabulary.py` (whether two models give a token the same meaning).
"""
