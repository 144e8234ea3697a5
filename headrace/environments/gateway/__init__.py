"""The gateway: agents that live in other processes ask for the turns of their rollouts over HTTP, in OpenAI's format.

Read `chat_tree.py` (the messages of a request continue an earlier reply, or begin a path), `gateway_rollout.py` (one rollout: its secret,
its requests in progress), `chat_answers.py` (a reply as OpenAI's clients read it), `chat_routes.py` (its routes), `gateway.py` (the
server).
"""
