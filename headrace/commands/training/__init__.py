"""Commands that train and measure.

Read `train_command.py` (`headrace train` and `eval`), `sweep_command.py` (many of them), `init_command.py` and `starter.py` (`headrace init`: a first config from three answers).
"""
