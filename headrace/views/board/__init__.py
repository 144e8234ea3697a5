"""`headrace board`: a live page of all runs of a directory, served from the runs' own files. It changes nothing in them.

Read `followed_run.py` (a run that is read while it is written), `step_windows.py` (some steps of a long run) with `paging.py` (their
choice), `browsing.py` (rollouts by their numbers and words), `lane_facts.py` with `swimlanes.py`
(rollouts over time), `run_list.py` (the runs of a directory),
`board_parts.py` (the HTML, which is the report's), `runs_board.py` (all of this together), `board_routes.py` (the answers) and `cookie.py`
(a browser with a token). `page/` holds the page; its charts are drawn by uPlot, with its licence beside it.
"""
