"""Processes in which the user's environments run beside generation, and which can be killed.

Read `episode_frames.py` (the wire); in the controller `environment_pool.py` (one process, and which rollout is played in which, and played again); in
the process `environment_worker.py` (its main), `player.py` (what it plays with, and its rollouts), `step_driver.py` (a rollout that a class plays
from turn to turn), `talk.py` (the agent that the user's function is given), `tools.py`.
"""
