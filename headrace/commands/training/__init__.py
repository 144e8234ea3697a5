"""Commands that train and measure.

Read `train_command.py` (`headrace train`, `eval` and `init`), `sweep_command.py` (many of them) and `starter.py` (a first config from three answers).
"""
