"""What people see in a terminal or a notebook.

Read `surface.py` (where a view is drawn), `layout.py` (how it uses width and height), `live.py` (the view of a run that goes on),
`terminal.py` and `board.py` (the sinks that draw it, for one adapter and for several); then `summary.py` (at the end),
`status_view.py` and `inspect_view.py` (the commands `status` and `inspect`).
"""
