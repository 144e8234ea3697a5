"""Environments of other libraries, each as a function that plays a rollout, like one of the user. They run in the processes of
`workers/`.

Read `options.py` (what all of them check), `attempts.py` (a problem of reasoning-gym, with further attempts) `gym.py`
(environments with the methods of skyrl-gym's) and `games.py` (textarena's games). `kinds.py` above names them. Each is a plain function, which has a thread for each
rollout, because these environments block.
"""
