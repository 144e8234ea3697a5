"""Several engines as one.

Read `member.py` (one engine of a fleet), `homes.py` (the member that a request goes to), `moving_requests.py` (requests, and their way from one
member to another), `rotation.py` (the members that serve), `care.py` (the way of a member out of the rotation and back), `totals.py`
(statistics and capabilities), `lent.py` (a member that the trainer lends its devices), `fleet.py` (protocol `Engine`).
"""
