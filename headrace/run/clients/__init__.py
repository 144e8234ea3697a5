"""The ports `Engine` and `Trainer`, over workers that run them.

Read `keeper.py` (the engine's worker, replaced when it dies), `process_engine.py` (the port: a keeper, and the requests that the engine
has; also on devices that the trainer lends), `process_trainer.py` (a trainer, its ranks as one worker, and one that clients of a server
share), `bus_engine.py` (the engines of rollout hosts), `hosted_site.py` (a worker that runs the user's code, as the pools of its processes
see it).
"""
