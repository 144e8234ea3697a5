"""Dashboards that a setting switches on, a file each, named like the setting: `observe.tensorboard` is `tensorboard.py`. Each has a function
`open_sink`, which `observe/build.py` calls.

Read `scalars.py` (the numbers and their names), `queued.py` (what a dashboard is, and the thread that calls it), `hushing.py`,
`tensorboard.py`, `trackio.py`, `wandb.py`, `mlflow.py`.
"""
