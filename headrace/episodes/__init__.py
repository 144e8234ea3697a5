"""A prompt becomes scored rollouts.

Read `rollout.py` (settings and requests), `rollout_session.py` (one episode as it is played), `notebook.py` (the notes of its environment),
`branching.py` (alternatives from a turn), `episodes.py` (one prompt, G episodes), then the folders: `tasks/` (where prompts come from),
`environments/` (what answers a turn), `scoring/` (rewards) and `sandbox/` (code of a policy).
"""
