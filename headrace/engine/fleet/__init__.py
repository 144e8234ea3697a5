"""Several engines as one.

Read `member.py` (one engine of a fleet), `dispatch.py` (the member that a request goes to, and its way from one member to another), `rotation.py` (the
members that serve; the way of a member out of the rotation and back), `fleet.py` (protocol `Engine`, its statistics, and a member that the trainer lends
its devices).
"""
