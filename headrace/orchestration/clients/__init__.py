"""The ports `Engine` and `Trainer`, over workers that run them.

Read `request_book.py` (the requests that an engine has, and what is known of each), `keeper.py` (the engine's worker, replaced when it
dies), `process_engine.py` (the port: a book and a keeper), `process_trainer.py`.
"""
