"""The nouns, the ports and the errors that every part speaks. Nothing here starts a process, reads a setting or touches a tensor.

Read `types.py` (prompts, requests, completions, rows), `sampling_masks.py` (the tokens that a draw was from), `batches.py` (groups and the trainer's batch), `steps.py` (what happens inside an
episode), `playing.py` (what an environment sees of a run), `weights.py` (versions and their files), `reports.py` (what engine and trainer
report), `rewards.py` (which numbers training calculates with), `protocols.py` (the ports: engine, trainer, task, scorer, transport),
`errors.py`, `printing.py` (text on its way to a terminal) and `chat/` (chats with tools, as text).
"""
