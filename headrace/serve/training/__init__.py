"""`headrace serve --train`: clients train adapters of the served model and sample from them, through the API of Tinker.

Read `tinker_routes.py` (what is called), `tinker_service.py` (what is behind it, and what each operation does), `tinker_messages.py` (what is sent),
`futures.py` (results that are fetched later), `sessions.py` (who is there, and a client's requests in order), `samplers.py` (samples, and adapters that
share the engine's places), `saved_weights.py`.
"""
