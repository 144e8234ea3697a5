"""Commands that give a run's model away. Read `export_command.py` (the arguments of `headrace export`)."""
