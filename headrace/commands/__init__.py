"""The commands of `cli.py`. A file `*_command.py` or `*_commands.py` has the arguments of its commands and imports the work itself only when it is called.

Read `arguments.py` (arguments that several commands have, and the run that a name means), then `training/` (train, eval),
`show/` (status, inspect, diff, report), `replay/` (steps that are repeated), `publishing/` (export), `running/` (commands that
start a run or talk to one), `importing/` (configs of other libraries), `serving/` (the engine and the board behind HTTP) and `installed/` (the machine, and what is installed on it).
"""
