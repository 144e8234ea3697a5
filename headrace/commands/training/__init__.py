"""Commands that train and measure. Read `train_command.py` (`headrace train` and `eval`)."""
