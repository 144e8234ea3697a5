"""A bus with a network that is cut: `bus_world.py`, `cutting.py`, `redis_server.py`."""
