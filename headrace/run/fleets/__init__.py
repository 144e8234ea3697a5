"""Fleets of a run: their members, and changing them while it runs.

Read `core_shares.py` (the settings of every member), `fleet_start.py`, and `pool_door.py` (the socket in the run's directory through which
a person changes the servers, and the file that remembers it).
"""
