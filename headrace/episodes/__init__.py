"""A prompt becomes scored rollouts.

Read `rollout.py` (settings, requests, and alternatives from a turn), `rollout_session.py` (one episode as it is played, and the notes of its
environment), `episodes.py` (one prompt, G episodes), then the folders: `tasks/` (where prompts come from), `environments/` (what answers a turn),
`scoring/` (rewards) and `sandbox/` (code of a policy).
"""
