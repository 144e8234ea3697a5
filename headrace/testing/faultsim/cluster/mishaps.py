"""Everything that goes wrong in a simulated cluster, as a schedule that follows from rates and a seed."""

from __future__ import annotations

import random
from typing import Literal

from headrace.core.types import Struct
from headrace.testing.faultsim.cluster.sizing import ClusterSize

Kind = Literal[
    "gpu_crashes", "gpu_hangs", "gpu_slows", "node_lost", "network_flap", "slow_link", "message_repeated", "clock_jump", "controller_killed",
]  # fmt: skip

DAY = 24 * 3600.0

GPU_HOURS = 50_000.0
"""Hours of one GPU between two failures: 419 interruptions in 54 days of 16,384 GPUs (The Llama 3 Herd of Models, 2024, section 3.3.4) are one in
50,700."""

GPU_KINDS: dict[Kind, float] = {"gpu_crashes": 0.7, "gpu_hangs": 0.2, "gpu_slows": 0.1}
"""The shares of GPU failures that end the process, that make it hang, and that make it slow. An assumption."""

PER_DAY: dict[Kind, float] = {
    "node_lost": 1 / 7,
    "network_flap": 1.0,
    "slow_link": 0.5,
    "message_repeated": 1.0,
    "clock_jump": 1 / 7,
    "controller_killed": 1 / 30,
}
"""Events a day in the whole cluster, however large it is. Those below the second one are assumptions."""


class Mishap(Struct, frozen=True):
    t: float
    """Seconds since the day began."""
    kind: Kind
    place: float
    """A number in [0, 1) that says where: which GPU, node or rack."""
    seconds: float = 0.0
    """How long it lasts, where it ends by itself; the size of a jump."""

    def at(self, count: int) -> int:
        """The mishap's place among `count` places."""
        return int(self.place * count)


def mishaps_of(size: ClusterSize, seconds: float, seed: int, harsher: float = 1.0) -> list[Mishap]:
    """Draws the mishaps of so many seconds, in order. `harsher`: the factor on all rates."""
    rng, found = random.Random(f"mishaps/{seed}"), list[Mishap]()
    rates = PER_DAY | {kind: share * size.gpus * 24 / GPU_HOURS for kind, share in GPU_KINDS.items()}
    for kind, per_day in sorted(rates.items()):
        if not per_day * harsher:
            continue
        t = rng.expovariate(per_day * harsher / DAY)
        while t < seconds:
            found.append(Mishap(t, kind, rng.random(), _duration(kind, rng)))
            t += rng.expovariate(per_day * harsher / DAY)
    return sorted(found, key=lambda mishap: mishap.t)


def _duration(kind: Kind, rng: random.Random) -> float:
    match kind:
        case "network_flap":
            return 2.0 * 60.0 ** rng.random()  # 2 to 120 seconds
        case "gpu_slows" | "slow_link":
            return rng.uniform(600.0, 5400.0)
        case "clock_jump":
            return rng.uniform(10.0, 900.0)
        case _:
            return 0.0
