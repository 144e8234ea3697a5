"""Teachers as a stage of scoring. Read `config.py`, `stage.py` (log-probs of the tokens that the policy sampled, if both models give a token the
same meaning), `own_prompt.py` (a teacher that is shown more than the policy) and `text_teacher.py` (rewards of models that read text).
"""
