"""Environments: one is made for each rollout, asks the engine for turns, and gives rewards of its own by name.

Read `config.py`, `kinds.py` (the kinds of environments), `single_turn.py` (one completion of the prompt, which is most
of post-training), `function.py` (a function of the user, and what it keeps to go on after a kill) with `conversation.py` (chat to tokens and back; a
turn that is read while it is sampled), `workers/` (the processes that run it) and `libraries/` (environments of other libraries, which run there too), `agents/` (a
command of the user, a process per rollout; and agents elsewhere) with `gateway/` (their turns over HTTP), `atropos/` (environments of Atropos),
`verifiers/` (tasksets of verifiers, in an interpreter of their own). The port is `protocols.Environment`; `episodes/episodes.py` plays an episode.
"""
