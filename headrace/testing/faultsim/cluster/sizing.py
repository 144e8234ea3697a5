"""The size and the speeds of a simulated cluster.

The defaults are a dense model of 70B parameters on 1,024 H100 that thinks for long: 232 engines of four GPUs, and 96 trainer ranks. Their speeds are
those of the planner's roofline (`commands/plan/rates/hardware.py`), written out as numbers:

    a pass of n sequences   14.6 ms for the weights + 3 ms fixed + n · 1.11 ms for a cache of 32,000 tokens each
    a trained token         6 · 70.6e9 operations at 40 % of 96 H100, less 5 % for every doubling beyond eight
    new weights             141 GB at 40 GB/s
"""

from __future__ import annotations

from msgspec.structs import replace

from headrace.core.types import Struct
from headrace.episodes.rollout import RolloutConfig
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world.surroundings import Distribution


class ClusterSize(Struct, frozen=True, kw_only=True):
    engines: int = 232
    gpus_per_engine: int = 4
    ranks: int = 96
    """Ranks of the trainer, one GPU each."""
    node_gpus: int = 8
    rack_nodes: int = 8
    """Nodes behind one switch."""
    spare_nodes: int = 2
    rows: int = 7
    """Sequences that an engine decodes at once: its memory beside the weights holds 449,000 tokens."""
    pass_fixed: float = 0.0176
    pass_row: float = 0.00111
    prefill: float = 78e-6
    """Seconds per token of a prefix that is computed again."""
    step_fixed: float = 0.7
    step_token: float = 13.4e-6
    publish: float = 0.2
    fetch: float = 3.5
    """Seconds from published weights to the swap."""
    gather: float = 4.0
    """Seconds in which the ranks gather a checkpoint."""
    save: float = 16.0
    reward: float = 2.0
    """Seconds that the rewards of a group take."""
    engine_boot: float = 120.0
    trainer_boot: float = 240.0
    restart: float = 60.0
    """Seconds until a supervisor has started the controller again."""
    swap_node: float = 600.0
    """Seconds until a spare node has taken the place of one that failed."""
    repair: float = 4 * 3600.0
    """Seconds until a failed node is a spare one."""
    completions: Distribution = Distribution("lognormal", mean=64_000, sigma=0.6, correlation=0.5)
    max_tokens: int = 131_072
    prompt: float = 500.0
    groups_per_step: int = 32
    group_size: int = 8
    max_lag: int = 7
    window: int = 33
    checkpoint_every: int = 4
    contrast: float = 0.85
    """Share of groups whose rewards differ; the others are dropped."""
    ticket_deaths: int = 3
    """`engine.ticket_deaths`."""
    grain: int = 8192
    """Real tokens that one simulated token stands for."""
    silence: float = 60.0
    """Seconds after which a member of the fleet that does not answer leaves it, and between two questions to it."""
    beats: float = 600.0
    """Seconds without a beat after which a worker counts as lost. Real runs allow 5, with a beat every second: two hours of these take 0.8 s of CPU time
    for each engine."""
    stop_after: float = 4 * 3600.0
    """`watch.stop_after`: a group waits for the engine for up to two hours."""

    @classmethod
    def of_one_gpu(cls) -> ClusterSize:
        """Returns 1,024 H100 for a dense model of 7.6B parameters (28 layers with four heads of keys and values): 928 engines of one GPU, and 96 ranks.

        By the same roofline: 6.3 ms for the weights, 0.76 ms for a cache of 32,000 tokens, room for 960,000 of them, 15.2 GB of new weights."""
        return cls(
            engines=928,
            gpus_per_engine=1,
            rows=15,
            pass_fixed=0.0093,
            pass_row=0.00076,
            prefill=34e-6,
            step_token=1.44e-6,
            fetch=0.4,
            gather=0.5,
            save=2.0,
            engine_boot=60.0,
            trainer_boot=120.0,
            groups_per_step=224,
            window=225,
        )

    @property
    def gpus(self) -> int:
        return self.engines * self.gpus_per_engine + self.ranks

    @property
    def staleness(self) -> StalenessConfig:
        return StalenessConfig(groups_per_step=self.groups_per_step, max_lag=self.max_lag, window=self.window)

    @property
    def rollout(self) -> RolloutConfig:
        """Tokens are simulated ones."""
        return RolloutConfig(group_size=self.group_size, max_tokens=-(-self.max_tokens // self.grain), patience=1000)

    def pass_seconds(self, running: int) -> float:
        return self.pass_fixed + self.pass_row * running

    def on(self, gpus: int) -> ClusterSize:
        """Returns a cluster of about as many GPUs, with the same shares. Raises ValueError for fewer than 64."""
        if gpus < 64:
            raise ValueError(f"{gpus} GPUs are no cluster; simulate at least 64")
        share = gpus / self.gpus
        ranks = max(8, round(self.ranks * share / 8) * 8)
        groups = max(2, round(self.groups_per_step * share))
        return replace(
            self,
            engines=(gpus - ranks) // self.gpus_per_engine,
            ranks=ranks,
            step_token=self.step_token * self.ranks / ranks,
            groups_per_step=groups,
            window=groups + 1,
        )
