"""The gateway: agents that live in other processes ask for the turns of their rollouts over HTTP, in OpenAI's or Anthropic's format.

Read `history_trees.py` (a request continues what was sampled before, or begins a path; one rollout with its secret), `turn_request.py` (a request
for a turn, in whatever format, and all that a run tells such an environment) and `format_routes.py` (the formats, which `headrace serve` has
too: `web/formats/`). `gateway.py` is the server.
"""
