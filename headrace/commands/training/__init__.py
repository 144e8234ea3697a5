"""Commands that train and measure.

Read `train_command.py` (`headrace train` and `eval`), `init_command.py` and `starter.py` (`headrace init`: a first config from three answers).
"""
