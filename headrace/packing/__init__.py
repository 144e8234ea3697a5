"""A batch -> packed microbatches without padding: every token that rows share is forwarded once."""

from headrace.packing.pack import ROOT, Kept, Pack, Plan, Segment
from headrace.packing.plan import loss_places, pack_rows, pack_sequence
from headrace.packing.ranks import split_ranks

__all__ = ["ROOT", "Kept", "Pack", "Plan", "Segment", "loss_places", "pack_rows", "pack_sequence", "split_ranks"]
