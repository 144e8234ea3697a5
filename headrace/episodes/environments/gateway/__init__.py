"""The gateway: agents that live in other processes ask for the turns of their rollouts over HTTP, in OpenAI's or Anthropic's format.

Read `chat_tree.py` (the messages of a request continue an earlier reply, or begin a path) and `text_tree.py` (so does a text),
`gateway_rollout.py` (one rollout: its secret, its requests in progress), `turn_request.py` (a request for a turn, in whatever format), `opened_with.py` (all that a run tells such an environment), then
the formats: `chat_answers.py` and `chat_routes.py` (OpenAI's chats), `completions_routes.py` (texts), `responses_routes.py` (OpenAI's
responses) and `anthropic_routes.py`, which `headrace serve` has too (`web/formats/`). `gateway.py` is the server.
"""
