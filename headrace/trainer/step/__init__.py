"""One optimizer step of whatever is trained.

Read `trainer.py` (the port), `learner.py` (one set of parameters and its optimizer), `gradient.py` (microbatches), `sums.py` (the numbers
of its report), `preferring.py` (a loss of pairs of rollouts, as slopes of their tokens), `optimizer.py` (the update), `reference.py`
(the other model of the KL term), `checkpoint.py`, `host_copy.py` (its tensors, copied), `exporting.py` (a checkpoint as a model's directory), `shadow.py` (older weights as a
teacher), `bitwise.py` (log-probs that must be the sampler's), `rescore.py` (a step without its update), `trial.py` (weights that are
changed for a moment) with `known_effects.py` (what an earlier process computed of them).
"""
