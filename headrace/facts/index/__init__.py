"""The numbers of a run by step and by group, as arrays, and its sums; and files of both that a run writes beside its metrics, so that the
board opens a long run at once.

Read `growing.py` (arrays that are appended to), `step_columns.py` (numbers by step), `group_table.py` (numbers by group), `numbers.py` (both,
from facts), `index_file.py` (the file), `digest.py` (the sums, and their file) and
`index_sink.py` (how a run writes both).
"""
