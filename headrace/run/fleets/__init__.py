"""Fleets of a run: their members, and changing them while it runs.

Read `core_shares.py` (the settings of every member), `roster.py` (the servers of a run, as a person has changed them), `pool_door.py` (the socket
in the run's directory through which that is done), `fleet_start.py`.
"""
