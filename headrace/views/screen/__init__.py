"""The views in a terminal or a notebook.

Read `console.py` (which text arrives there), `start_line.py` (what a start waits for), `surface.py` (terminal or notebook), `layout.py` (the use of width and height),
`fitted_table.py` (tables), `members.py` (the engines of a fleet), `live.py` (the live view of a run), `terminal.py` and `board.py` (the
sinks that draw it, for one adapter and for several); then `summary.py` (at the end of a run), `status_view.py`, `inspect_view.py`
and `preflight_view.py` (the commands `status`, `inspect` and `preflight`).
"""
