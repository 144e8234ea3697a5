"""Dashboards that a setting switches on, a file each, named like the setting: `observe.tensorboard` is `tensorboard.py`. Each has a function
`open_sink`, which `views/build.py` calls.

Read `queued.py` (what a dashboard is, and the thread that calls it),
`tensorboard.py`, `trackio.py`, `wandb.py`, `mlflow.py`, `webhook.py` (messages instead of numbers).
"""
