"""`headrace serve --train`: clients train adapters of the served model and sample from them, through the API of Tinker.

Read `routes.py` (what is called), `door.py` (what is behind it), `models.py` (a client's requests in order), `operations.py` (what each does),
`futures.py` (results that are fetched later), `sessions.py` (who is there), `samplers.py` and `shelf.py` (samples, and adapters that share the
engine's places), `store.py` (saved weights), `messages/` (what is sent), `opening.py`.
"""
