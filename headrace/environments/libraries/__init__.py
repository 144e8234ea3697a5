"""Environments of other libraries, each as a function that plays a rollout, like one of the user. They run in the processes of
`workers/`.

Read `options.py` (what all of them check), `attempts.py` (a problem of reasoning-gym, with further attempts), `gym.py`
(environments with the methods of skyrl-gym's), `games.py` (textarena's games) and `openenv.py` (environments behind a server). `kinds.py`
above names them. Those that block are plain functions, which have a thread for each rollout.
"""
