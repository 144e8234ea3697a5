"""A batch becomes packed microbatches without padding: every token that rows share is forwarded once.

Read `pack.py` (the columns of a microbatch), `trees.py` (rows that begin alike, and their trees as columns), `plan.py` (microbatches within a
token budget, on one device or several; numbers of loss tokens, back at their places in the rows).
"""

from headrace.trainer.packing.pack import ROOT, Kept, Pack, Segment, StepPlan, StepRows
from headrace.trainer.packing.plan import PickedNumbers, fill_up, loss_places, pack_rows, pack_sequence, split_ranks

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
