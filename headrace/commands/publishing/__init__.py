"""Commands that give a run's model away.

Read `export_command.py` (`headrace export`, and uploading a model), `gguf_file.py` (a file for llama.cpp) and `model_card.py` (the card of a model, with a curve, and what loads it).
"""
