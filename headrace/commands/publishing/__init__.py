"""Commands that give a run's model away.

Read `export_command.py` (`headrace export`), `model_card.py` with `curve_picture.py` (the card of a model) and `hub.py` (uploading it).
"""
