"""The nouns, the ports and the errors that every part speaks. Nothing here starts a process, reads a setting or touches a tensor.

Read `types.py` (prompts, requests, completions, rows), `batches.py` (groups and the trainer's batch), `rewards.py` (which numbers
training calculates with), `sampling_masks.py` (the tokens that a draw was from),
`steps.py` (what happens inside an episode), `weights.py` (versions and their files), `reports.py` (what engine and trainer
report), `protocols.py` (the ports: environment, engine, trainer, task, scorer, transport), `errors.py`, `printing.py` (text on its way to a
terminal) and `chat/` (chats with tools, as text).
"""
