"""One optimizer step of whatever is trained.

Read `trainer.py` (the port; a checkpoint as a model's directory; a step without its update), `learner.py` (one set of parameters, its optimizer
and its update), `gradient.py` (microbatches, the numbers of the report), `whole_step.py` (a loss that depends on more than a microbatch), `value_head.py` (a critic), `process_reward.py` (a reward model that is trained before the policy), `reference.py` (the other model of the
KL term, and older weights as a teacher), `teacher.py` (a teacher of whole distributions), `checkpoint.py` and `checkpoint_files.py`, `host_memory.py` (tensors in the host's memory: copies, and a trainer that sleeps),
`bitwise.py` (log-probs that must be the sampler's), `trial.py` (weights that are changed for a moment, and effects that an earlier process
computed).
"""
