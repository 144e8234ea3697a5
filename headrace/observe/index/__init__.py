"""The numbers of a run by step and by group, as arrays; and a file of them that a run writes beside its metrics, so that the board opens a
long run at once.

Read `growing.py` (arrays that are appended to), `step_columns.py` (numbers by step), `group_table.py` (numbers by group), `numbers.py` (both,
from facts), `index_file.py` (the file) and `index_sink.py` (how a run writes it).
"""
