"""A batch becomes packed microbatches without padding: every token that rows share is forwarded once.

Read `pack.py` (the columns of a microbatch), `tree.py` (rows that begin alike), `columns.py` (trees into columns), `plan.py` (microbatches
within a token budget), `ranks.py` (microbatches of several devices), `picked.py` (numbers of loss tokens, back at their places in the rows).
"""

from headrace.trainer.packing.pack import ROOT, Kept, Pack, Segment, StepPlan, StepRows
from headrace.trainer.packing.picked import PickedNumbers
from headrace.trainer.packing.plan import loss_places, pack_rows, pack_sequence
from headrace.trainer.packing.ranks import fill_up, split_ranks

__all__ = [
    "ROOT",
    "Kept",
    "Pack",
    "PickedNumbers",
    "Segment",
    "StepPlan",
    "StepRows",
    "fill_up",
    "loss_places",
    "pack_rows",
    "pack_sequence",
    "split_ranks",
]
