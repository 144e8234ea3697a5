"""Facts for people. Each view reads what a run has recorded, and can be left out without a trace in the run.

Read `config.py` and `build.py` (the recorder with its views and sinks), then the folders: `screen/` (terminal and notebook), `report/` (a page
of charts), `board/` (a live page of all runs), `sinks/` (dashboards).
"""
