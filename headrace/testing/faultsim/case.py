"""One simulated run as a value: its settings, its schedule, its faults. Equal cases run equally."""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

from msgspec.structs import replace

from headrace.algo.recipe_parts import Experience
from headrace.core.types import Struct
from headrace.durable.segments import SEGMENT
from headrace.loop.curriculum_config import CurriculumConfig
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world.surroundings import SimulatedTask, fixed
from headrace.testing.faultsim.faults import Fault, every_engine_lost, faults_of_service, kill_at_a_removal, some_faults

Mode = Literal["inflight", "stream", "abort_resume", "save_resume", "drain", "barrier", "cancel_group"]
MODES: tuple[Mode, ...] = (
    "inflight", "stream", "abort_resume", "save_resume", "drain", "barrier", "cancel_group",
)  # fmt: skip


DISTINCT = 7
"""Different prompts of a run with a curriculum."""


class GroupShape(NamedTuple):
    """The rollouts of every group."""

    size: int
    turns: int = 1
    alternatives: int = 0
    """Alternatives of each rollout, from one of its turns on."""
    poisoned: tuple[int, ...] = ()
    """The tickets whose requests end every engine process that begins one."""

    def of(self, rollouts: int) -> GroupShape:
        """`rollouts`: the size of a group; 0 for the usual one."""
        return self._replace(size=rollouts or self.size)


class Case(Struct, frozen=True):
    """One run: its settings, its schedule (`seed`) and its faults. Equal cases run equally."""

    seed: int
    mode: Mode = "inflight"
    overdue: Literal["wait", "trim", "drop", "cancel"] = "wait"
    order: Literal["stalest", "finished"] = "stalest"
    groups: int = 2
    max_lag: int = 1
    window: int = 1
    group_size: int = 2
    steps: int = 5
    checkpoint_every: int = 2
    evaluate_every: int = 0
    stored: int = 0
    skips: bool = False
    """Whether some steps have a gradient that is not finite."""
    faults: tuple[Fault, ...] = ()
    stragglers: int = 0
    """The rewards of every `stragglers`-th prompt come so late that all other groups could overtake its group. 0 for none."""
    turns: int = 1
    """Turns of every rollout; more than one are those of the scripted environment (`testing/fake_environments.py`)."""
    resumes: Literal["replayed", "exported"] = "replayed"
    """How an environment of several turns goes on after a kill."""
    alternatives: int = 0
    """Alternatives from a turn of every rollout. Needs several turns, and an environment that exports its state."""
    members: int = 1
    """Engines; more than one are a fleet."""
    curriculum: Literal["uniform", "pools", "contrast"] = "uniform"
    """Which prompt is drawn next. Unless it is uniform, there are `DISTINCT` different prompts, which come again and again."""

    grows: bool = False
    """Whether the curriculum `contrast` doubles groups."""
    keeps: int = 0
    """Good rollouts of each prompt that are trained again with its next group (`algo.experience`), where prompts come again."""
    poisoned: tuple[int, ...] = ()
    """Tickets whose requests end every engine process that begins one."""
    shared: Literal["", "host", "drop"] = ""
    """Whether engine and trainer take turns on the same devices, and what becomes of the KV cache meanwhile. For one engine."""
    lent: bool = False
    """Whether the trainer lends its devices to an engine more while it waits."""
    served: bool = False
    """Whether rewards come from a service behind HTTP, which fails now and then."""
    segment: int = SEGMENT
    """Bytes of a segment of the journal."""

    @property
    def has_fleet(self) -> bool:
        return self.members > 1 or self.lent

    @property
    def shape(self) -> GroupShape:
        return GroupShape(self.group_size, self.turns, self.alternatives, self.poisoned)

    @property
    def staleness(self) -> StalenessConfig:
        return StalenessConfig(
            groups_per_step=self.groups,
            max_lag=self.max_lag,
            window=self.window,
            order=self.order,
            overdue=self.overdue,
            stored=self.stored,
        )

    @property
    def experience(self) -> Experience:
        """Fewer prompts than there are, so that some are let go."""
        return Experience(rollouts=self.keeps, prompts=DISTINCT - 3)

    @property
    def choosing(self) -> CurriculumConfig:
        """Few candidates and short times, so that short runs choose in every way."""
        candidates = {} if self.curriculum == "uniform" else {"candidates": 3, "remembered": DISTINCT - 2}
        times = {"pools": {"rest": 3, "wait": 2}, "contrast": {"half_life": 2}}.get(self.curriculum, {})
        sizes = {"largest_group": 2 * self.group_size} if self.grows and self.curriculum == "contrast" else {}
        return CurriculumConfig(kind=self.curriculum, **candidates, **times, **sizes)

    def task(self) -> SimulatedTask:
        """The task at its beginning."""
        return SimulatedTask(fixed(3), self.seed, 0 if self.curriculum == "uniform" else DISTINCT)

    @property
    def loses_nothing(self) -> bool:
        """Whether the trained prompts depend on nothing but their rewards."""
        waits = self.overdue == "wait" and self.mode != "cancel_group" and not self.skips
        return waits and self.curriculum == "uniform"

    @property
    def synchronous(self) -> bool:
        """Whether the weights depend on nothing but settings and seed."""
        waits = self.max_lag == 0 and self.overdue == "wait" and self.mode != "cancel_group"
        repeatable = (
            self.turns == 1 or self.resumes == "replayed"
        )  # others say something else in each life (`kept_notes.py`)
        return waits and repeatable and self.curriculum == "uniform"


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    groups, max_lag = rng.choice([1, 2, 2, 3]), rng.choice([0, 1, 1, 2, 3])
    overdue = rng.choice(["wait", "wait", "wait", "trim", "drop", "cancel"])
    window = rng.randint(1, max_lag * groups + 1) if overdue == "wait" and rng.random() < 0.5 else 1
    steps, size = rng.choice([3, 4, 6]), rng.choice([2, 2, 3, 4])
    operations = 40 + steps * groups * (10 + 3 * size)
    case = Case(
        seed=seed,
        mode=rng.choice(MODES),
        overdue=overdue,  # type: ignore[arg-type]
        order=rng.choice(["stalest", "finished"]),
        groups=groups,
        max_lag=max_lag,
        window=window,
        group_size=size,
        steps=steps,
        checkpoint_every=rng.choice([0, 1, 2, 2, 3]),
        evaluate_every=rng.choice([0, 0, 1, 2]),
        stored=0 if overdue == "wait" else groups * rng.choice([1, 2, 4]),
        skips=rng.random() < 0.25,
        faults=some_faults(rng, operations),
        stragglers=rng.choice([0, 0, 2, 3, 5]),
        members=rng.choice([1, 1, 2, 2, 3]),
        segment=(SEGMENT, 2000, 400)[seed % 3],  # all in one, a few steps in each, a record or two in each
    )
    if case.members == 1 and seed % 3 == 1:
        case = replace(case, shared="host" if seed % 2 else "drop")
    elif seed % 5 == 2:
        case = replace(case, lent=True)
    # Seldom where the prompts that are trained are known beforehand, which is checked only without a curriculum.
    if _chooses(rng, case):
        case = replace(case, curriculum=rng.choice(["pools", "contrast"]), grows=seed % 4 < 2, keeps=seed % 3)
    case = _served(rng, case) if rng.randrange(4) == 0 else case
    return _aimed(case)


def _aimed(case: Case) -> Case:
    """Adds faults that meet what chance meets too seldom, by random numbers of their own: the other schedules stay as they are."""
    rng, lives = random.Random(f"aimed {case.seed}"), sum(fault.kind in ("kill", "power") for fault in case.faults)
    match case.seed % 11:
        case 3:
            return replace(case, faults=(*case.faults, kill_at_a_removal(rng, lives)))
        case 7 if case.has_fleet:
            return replace(case, faults=(*case.faults, *every_engine_lost(rng, lives, case.members + case.lent)))
    return case


def _served(rng: random.Random, case: Case) -> Case:
    lives = 1 + max((fault.life for fault in case.faults), default=0)
    failing = faults_of_service(rng, lives, 2 * case.steps * case.groups)
    return replace(case, served=True, faults=(*case.faults, *failing))


def _chooses(rng: random.Random, case: Case) -> bool:
    return rng.randrange(12 if case.loses_nothing else 2) == 0
