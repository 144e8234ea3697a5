"""Settings of the place from which a run's workers come (`places.py`), and how they reach it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.processes.joining.joined import ElsewherePlace, JoinPlace
from headrace.processes.places import PLACES, quoted
from headrace.processes.worker_place import WorkerPlace
from headrace.settings.process_config import LOCAL_HOSTS, WILDCARDS
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    PlaceKind = str
else:
    PlaceKind = Literal[tuple(PLACES)]


@dataclass(frozen=True, config=STRICT, kw_only=True)
class OrchestrationConfig:
    """The place from which the run's engines come, and how they reach it (docs/cluster.md)."""

    kind: PlaceKind = "local"
    """The place. Each states who starts the workers (`WorkerPlace.about`), and docs/settings.md lists them."""
    trainer: Literal["local", "elsewhere"] = "local"
    """elsewhere: the trainer's ranks join, or Ray places them; all their machines must see the run's directory (`out`)."""
    address: str = "local"
    """kind = "ray": local: a cluster of the run's own, here; auto: the one that this machine is a node of; or
    HOST:PORT."""
    gpus: int = Field(default=0, ge=0)
    """GPUs that Ray gives each engine, beside `engine.threads` CPUs."""
    rank_gpus: int = Field(default=0, ge=0)
    """GPUs (0 or 1 are of use) that Ray gives each rank of a trainer elsewhere, beside `train.threads` CPUs."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Further resources that Ray gives each engine, by its names: {"accelerator_type:H100" = 0.001} is a GPU of that type."""
    rank_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Further resources that Ray gives each rank of a trainer elsewhere."""
    grows: bool = False
    """Whether the Ray cluster adds nodes on demand. A run then waits for nodes that are not there yet, until
    `watch.stop_after`; otherwise a cluster that is too small is refused."""
    scorers: int = Field(default=0, ge=0)
    """Workers elsewhere (`headrace worker --offers scorer`) that run `reward.functions`. 0: this machine does it."""
    environments: int = Field(default=0, ge=0)
    """Workers elsewhere (`headrace worker --offers environment`) that play rollouts. 0: this machine does it."""
    also_here: bool = False
    """Whether this machine shares the work of `scorers` and `environments`."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT at which the run listens for workers; the default reaches this machine only, port 0 is a free one."""
    token_file: str = ""
    """File, readable by its owner only, with the token of workers that join. Ray: a run makes its own."""
    cert: str = ""
    """Certificate file (PEM), for TLS; workers that join check it with `--ca`."""
    key: str = ""
    """File with the private key of `cert` (PEM)."""
    placement: Literal["apart", "shared"] = "apart"
    """apart: engine and trainer work at the same time, each on its own devices, or on all cores of a CPU. shared:
    they take turns on the same devices (docs/turns.md)."""
    kv: Literal["host", "drop"] = "host"
    """placement = "shared": the KV cache of running requests while the trainer works. host: copied to the host's memory
    and back; drop: freed, and computed again (always so with vLLM)."""
    lend: bool = False
    """A second engine generates on the trainer's devices while it waits, and gives way when a batch is ready
    (docs/turns.md)."""
    give_way: float = Field(default=30.0, gt=0)
    """Seconds in which that engine must return the devices before it is killed."""
    reconnect: float = Field(default=5.0, ge=0)
    """Seconds in which a worker that joined may come back after its connection broke, with nothing lost. 0: none."""
    grace: float = Field(default=25.0, gt=0)
    """Seconds after SIGTERM for a last checkpoint, below the system's limit: Kubernetes and Slurm (`KillWait`) kill after 30 s."""
    bus: str = ""
    """The bus over which rollout hosts (`headrace rollouts`) get tickets and return groups, instead of an engine of the
    run's own (docs/bus.md): redis://HOST:PORT (rediss:// with TLS; `token_file` holds the password, which is then the
    token of ranks that join too), or jsonl:DIRECTORY, which all machines share."""
    bus_forgets: bool = False
    """Accept a Redis server without an append-only file; after its restart, unconsumed rollouts are sampled again."""

    @model_validator(mode="after")
    def _bus_is_one(self) -> OrchestrationConfig:
        if not self.bus:
            if self.bus_forgets:
                raise ValueError(
                    "orchestration.bus_forgets is about a Redis server; set orchestration.bus, or remove it"
                )
            return self
        if not re.fullmatch(r"rediss?://[^\s/]+(/\d+)?|jsonl:.+", self.bus):
            raise ValueError(
                f'orchestration.bus = "{self.bus}" is not a bus; use redis://HOST:PORT, rediss://HOST:PORT or jsonl:DIRECTORY'
            )
        if "@" in self.bus and self.bus.startswith("redis"):
            raise ValueError(
                "orchestration.bus holds a password, and settings are written to the run's directory; put it into a file that only you may read, and "
                "name that as orchestration.token_file"
            )
        if self.bus_forgets and not self.bus.startswith("redis"):
            raise ValueError("orchestration.bus_forgets is about a Redis server, and files forget nothing; remove it")
        if self.hosts:
            raise ValueError(
                "orchestration.bus brings rollout hosts, which score and play their own rollouts; remove orchestration.scorers and environments"
            )
        if self.place.elsewhere and self.trains_here:
            raise ValueError(
                f'orchestration.bus brings rollout hosts, and orchestration.kind = "{self.kind}" engines elsewhere; remove one of the two, or set '
                'orchestration.trainer = "elsewhere", and only the trainer\'s ranks come from there'
            )
        if self.gpus or self.resources:
            raise ValueError(
                "orchestration.gpus and resources are those of engines that Ray places, and with orchestration.bus rollout hosts start the engines; "
                "remove them (orchestration.rank_gpus and rank_resources are the ranks')"
            )
        return self

    @model_validator(mode="after")
    def _fits_its_kind(self) -> OrchestrationConfig:
        host, colon, port = self.listen.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f'orchestration.listen = "{self.listen}" is not HOST:PORT, such as 10.0.0.5:7400')
        for name in dict.fromkeys(name for place in PLACES.values() for name in place.own):
            having = [place for place in PLACES.values() if name in place.own]
            if name == "token_file" and self.bus.startswith("redis"):
                continue
            if self.hosts and any(place.joins for place in having) and name != "trainer":
                continue
            if self.place not in having and getattr(self, name) != _default(name):
                wanted = quoted(place.name for place in having)
                raise ValueError(f"orchestration.{name} is for orchestration.kind = {wanted}; set that, or remove it")
        if self.hosts and self.place.refuses_hosts:
            others = quoted(place.name for place in PLACES.values() if not place.refuses_hosts)
            raise ValueError(
                f'orchestration.kind = "{self.kind}" {self.place.refuses_hosts}; use kind = {others}, or remove orchestration.scorers and environments'
            )
        if self.also_here and not self.hosts:
            raise ValueError(
                "orchestration.also_here is about scorers and environments elsewhere, and there are none; remove it"
            )
        if self.joined and not self.token_file:
            what = (
                f'orchestration.kind = "{self.kind}"'
                if self.place.joins
                else "a run with scorers or environments elsewhere"
            )
            raise ValueError(
                f"{what} needs orchestration.token_file: a file with a secret that workers know too "
                "(umask 077; openssl rand -hex 32 > FILE)"
            )
        if bool(self.cert) != bool(self.key):
            raise ValueError("orchestration.cert and orchestration.key belong together; set both, or none")
        for problem in self.place.problems(self):
            raise ValueError(problem)
        return self

    @property
    def at_home(self) -> OrchestrationConfig:
        """These settings without a bus and without turns, with a trainer, scorers and environments of this process: for an engine of
        this process that is always awake."""
        usual = {name: _default(name) for name in _AWAY}
        if self.bus or (self.hosts and not self.place.joins):
            usual |= {name: _default(name) for name in _JOINED}
        if self.bus:
            usual |= {"kind": "local", **{name: _default(name) for name in self.place.own}}
        return replace(self, **usual)

    @property
    def place(self) -> WorkerPlace:
        return PLACES[self.kind]

    @property
    def seating(self) -> ElsewherePlace:
        """The place that opens the seats of workers elsewhere."""
        return self.place if isinstance(self.place, ElsewherePlace) else JoinPlace()

    @property
    def elsewhere(self) -> bool:
        """Whether the engines are no children of the run's process."""
        return self.place.elsewhere and not self.bus

    @property
    def means(self) -> tuple[str, ...]:
        """Settings of `[engine]` that have a meaning for an engine of any kind because workers elsewhere have it: the deaths at a ticket, and the CPUs
        that each reserves."""
        if not self.elsewhere:
            return ()
        return ("ticket_deaths", *(["threads"] if self.place.reserves_cores else []))

    @property
    def takes_workers(self) -> bool:
        """Whether workers of any kind that the run's process does not start have seats in it. Rollout hosts have none."""
        return self.place.elsewhere or bool(self.hosts)

    @property
    def hosts(self) -> dict[Literal["scorer", "environment"], tuple[str, ...]]:
        """The names of the workers elsewhere that run the user's code, by what they offer."""
        counts: dict[Literal["scorer", "environment"], int] = {
            "scorer": self.scorers,
            "environment": self.environments,
        }
        return {
            kind: tuple(f"{kind} host{f' {number + 1}' if count > 1 else ''}" for number in range(count))
            for kind, count in counts.items()
            if count
        }

    @property
    def joined(self) -> bool:
        """Whether workers that were started elsewhere connect to the run, of any kind."""
        return self.place.joins or bool(self.hosts)

    @property
    def trains_here(self) -> bool:
        """Whether the trainer is a child of the run's process."""
        return self.trainer == "local"

    @property
    def is_here(self) -> bool:
        """Whether engines, trainer and environments are on this machine, and see its files."""
        return self.trains_here and not (self.elsewhere or self.bus or self.environments)

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])


_JOINED = ("token_file", "cert", "key", "reconnect", "listen")
_AWAY = (
    *("placement", "kv", "lend", "give_way", "trainer", "rank_gpus", "rank_resources"),
    *("scorers", "environments", "also_here", "bus", "bus_forgets"),
)


def _default(name: str) -> Any:
    known = OrchestrationConfig.__pydantic_fields__  # type: ignore[attr-defined]
    return known[name].get_default(call_default_factory=True)


def trainer_problems(config: OrchestrationConfig, cores: Collection[int], host: str, *, itself: bool) -> Iterator[str]:
    """Yields a sentence for each setting that does not go with a trainer elsewhere. `cores`: `train.cores`; `host`: `weight_sync.host`;
    `itself`: whether a teacher is the student's older self."""
    if config.trains_here:
        for name in ("rank_gpus", "rank_resources"):
            if getattr(config, name):
                yield f'orchestration.{name} is for orchestration.trainer = "elsewhere"; set that, or remove it'
        return
    asks = 'orchestration.trainer = "elsewhere"'
    if config.cert:
        yield (
            f"{asks} lets ranks talk to each other over gloo or NCCL, which encrypt nothing, so that orchestration.cert promises too much; use a "
            "private network (WireGuard, say) and remove orchestration.cert and key"
        )
    if config.place.joins and config.port == 0:
        yield (
            f'{asks} with orchestration.listen = "{config.listen}": after the death of a rank the run listens anew, and the others must find '
            "it; name a port"
        )
    if cores:
        yield f"train.cores are cores of this machine, and the trainer is elsewhere ({asks}); remove it"
    if host not in LOCAL_HOSTS:
        yield (
            f"weight_sync.host is an address of this machine, and engines fetch from the ranks, which are elsewhere ({asks}); remove it (each "
            "rank's own address: headrace worker --address)"
        )
    if itself:
        yield f"{asks}, and a teacher that is the student's older self shares memory with the run; give the teacher a model"


def elsewhere_problems(
    config: OrchestrationConfig,
    *,
    urls: Collection[str],
    gpus: Collection[int],
    cores: Collection[int],
    reached_at: str,
) -> Iterator[str]:
    """Yields a sentence for each setting that does not go with engines elsewhere. `urls`, `gpus`, `cores`: those of `[engine]`.
    `reached_at`: the address at which engines fetch weights."""
    if not config.elsewhere:
        return
    if urls:
        yield (
            f'engine.urls name servers that are running, and with orchestration.kind = "{config.kind}" workers elsewhere start the engines; remove one '
            "of the two"
        )
    if gpus:
        yield (
            f"engine.gpus are GPUs of this machine, and engines elsewhere have their own; remove it{config.place.instead_of_gpus}"
        )
    if cores:
        yield (
            f"engine.cores are cores of this machine, and engines elsewhere have their own; remove it{config.place.instead_of_cores}"
        )
    if config.place.given_address and config.host in WILDCARDS:
        yield (
            f'orchestration.listen = "{config.listen}" stands for every address of this machine, and {config.place.given_address} are given one to '
            "connect to; set it to the one that the nodes reach"
        )
    elif reached_at in WILDCARDS:
        yield (
            f'orchestration.listen = "{config.listen}" stands for every address of this machine; set weight_sync.host to the one at which '
            "engines fetch weights"
        )
