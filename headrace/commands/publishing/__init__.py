"""Commands that give a run's model away.

Read `export_command.py` (`headrace export`), `gguf_file.py` with `gguf_tokenizer.py` (a file for llama.cpp), `model_card.py` with `curve_picture.py` (the card of a model) and `hub.py` (uploading it).
"""
