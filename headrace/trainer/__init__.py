"""The trainer: packed rows in, one optimizer step after another, new weights out.

Read `step/` (an optimizer step; begin with `step/trainer.py`), `placement/` (where the weights lie), `forward/` (log-probs of packed rows),
`dealing/` (the rows of a step as columns, dealt to ranks), `packing/` (microbatches), `model/` (the trained model: Hugging Face's, adapters, weights of few bits), `shared/` (one base that several clients train), `kernels/` (the same passes in C++ on a CPU). `config.py` and `parallel.py` have
the settings, the learning rate as a function of the step, and the cut of a model into stages.
"""
