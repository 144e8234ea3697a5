"""A batch becomes packed microbatches without padding: every token that rows share is forwarded once.

Read `pack.py` (the columns of a microbatch), `packs.py` (their values, from trees of `dealing/`), `plan.py` (microbatches of a step, on one
device or several; numbers of loss tokens, back at their places in the rows).
"""

from headrace.trainer.packing.pack import ROOT, DealtRows, Kept, Pack, Segment, StepPlan, StepRows
from headrace.trainer.packing.plan import (
    PickedNumbers,
    empty_pack,
    fill_up,
    pack_rows,
    pack_sequence,
    plan_of,
    split_ranks,
)

__all__ = [
    "ROOT",
    "DealtRows",
    "Kept",
    "Pack",
    "PickedNumbers",
    "Segment",
    "StepPlan",
    "StepRows",
    "empty_pack",
    "fill_up",
    "pack_rows",
    "pack_sequence",
    "plan_of",
    "split_ranks",
]
