"""The bytes that a step of a large model moves through its busiest process, computed by the planner's own arithmetic: the table of docs/scale.md.

python benchmarks/scale_table.py [--model 70b --tokens 65e6 --ranks 64 --engines 232]
"""

from __future__ import annotations

import argparse

from headrace.commands.plan.rates.rates import ADAMW, BFLOAT16, step_sizes
from headrace.commands.plan.rates.shapes import shape_of
from headrace.trainer.parallel import ParallelConfig
from headrace.weight_sync.config import WeightSyncConfig
from headrace.weight_sync.packed import BLOCK, DIGEST
from headrace.weight_sync.tcp import Tcp

ROW, PROMPT = 8000, 200
"""Tokens of a completion and of a prompt."""

BATCH, HELD, DEAL, SNAPSHOT = 100, 16, 0.41e-6, 0.13e-6
"""Bytes of a token in the controller, as Python numbers and as columns that are sent; seconds of a core to deal it, and to write it into a checkpoint
(`large_step.py`, `live_tokens.py`)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="70b")
    parser.add_argument("--tokens", type=float, default=65e6)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--engines", type=int, default=232)
    given = parser.parse_args()
    parameters, tokens, engines = shape_of(given.model).parameters, given.tokens, given.engines
    size = step_sizes(
        sampled=tokens,
        prompts=tokens / ROW * PROMPT,
        parameters=parameters,
        mesh=ParallelConfig(shard=given.ranks),
        weights="float32",
        way=WeightSyncConfig(kind="tcp"),
    )
    giga = 1e9
    rows = {
        "the batch": f"{size.rows / giga:.2g} GB sent, {size.rank_rows / 1e6:.2g} MB to a rank; the controller holds {(BATCH + HELD) * tokens / giga:.2g} "
        f"GB and works {DEAL * tokens:.0f} s",
        "loading": f"{BFLOAT16 * parameters / given.ranks / giga:.2g} GB read by a rank, {8 * 4 * parameters / given.ranks / giga:.2g} GB held by a node of 8",
        "resume": f"{ADAMW['float32'] * parameters / given.ranks / giga:.2g} GB a rank",
        "checkpoint": f"{size.rank_checkpoint / giga:.2g} GB copied and written by a rank, of {size.checkpoint / giga:.0f}",
        "publish": f"{size.rank_weights / giga:.2g} GB a rank; rank 0 gets {DIGEST / BLOCK * size.weights / 1e6:.2g} MB of hashes",
        "TCP": f"{Tcp.copies(engines) * size.rank_weights / giga:.2g} GB through each rank; {engines} engines send each other the rest of "
        f"{engines * size.weights / 1e12:.1f} TB, in the mean {size.weights / giga:.0f} GB each",
        "controller": f"{SNAPSHOT * tokens:.1f} s of a core for a checkpoint's live tokens",
    }
    for name, said in rows.items():
        print(f"| {name} | {said} |")


if __name__ == "__main__":
    main()
