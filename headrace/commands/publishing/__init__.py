"""Commands that give a run's model away.

Read `export_command.py` (`headrace export`), `gguf_file.py` (a file for llama.cpp), `model_card.py` (the card of a model, with a curve, and what loads it) and `hub.py` (uploading it).
"""
