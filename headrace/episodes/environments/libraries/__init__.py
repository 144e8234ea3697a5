"""Environments of other libraries, each as a class that goes from turn to turn, like one of the user. They run in the processes of
`workers/`.

Read `options.py` (what all of them check, and the state of those that follow from the replies to them), `attempts.py`
(a problem of reasoning-gym, with further attempts), `gym.py` (environments with the methods of skyrl-gym's), `games.py` (textarena's
games) and `openenv.py` (environments behind a server). `environments/kinds.py` names them.
"""
