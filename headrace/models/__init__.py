"""Models as files: where they come from and what belongs to them. Nothing here runs one.

Read `resolve.py` (a name becomes a directory) with `known_models.py` (the table) and `model_files.py` (what a directory must hold);
`chat.py` (messages and tokens), `lora.py` (what an adapter is).
"""
