"""The views in a terminal or a notebook.

Read `console.py` (which text arrives there), `start_line.py` (what a start waits for), `layout.py` (the use of width and height; tables),
`live.py` (the live view of a run, with the engines of a fleet), `terminal.py` (the sinks that draw it, in a terminal or a notebook, for one adapter and for several);
then `summary.py` (at the end of a run), `status_view.py`, `inspect_view.py` and `preflight_view.py` (the commands `status`, `inspect` and `preflight`).
"""
