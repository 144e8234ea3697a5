"""What a rollout lives in: an environment is made for it, asks the engine for turns, and gives rewards of its own by name.

Read `config.py`, `kinds.py` (the kinds there are), `single_turn.py` (one completion of the prompt, which is most of
post-training). `fake.py` is an environment of two turns without a tokenizer. The port is `protocols.Environment`; how an episode is
played is in `rollouts/episodes.py`.
"""
