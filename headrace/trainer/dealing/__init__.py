"""The rows of an optimizer step, dealt to the ranks that train on them. Runs in the controller too: imports no torch.

Read `row_paths.py` (a row as columns), `trees.py` (rows that begin alike), `deal.py` (which trees go to which rank, in which microbatch), `share.py`
(the share of a rank, as it is sent).
"""
