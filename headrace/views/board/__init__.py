"""`headrace board`: a live page of all runs of a directory, served from the runs' own files. It changes nothing in them.

Read `followed_run.py` (runs that are read while they are written), `browsing.py` (rollouts by their numbers and words), `swimlanes.py`
(rollouts over time), `board_parts.py` (the HTML, which is the report's, and the choice of steps), `runs_board.py` (all of this together) and
`board_routes.py` (the answers). `page/` holds the page; its charts are drawn by uPlot, with its licence beside it.
"""
