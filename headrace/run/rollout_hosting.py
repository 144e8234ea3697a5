"""A process that serves a run as a rollout host: it opens what the run's notice asks for."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.printing import say
from headrace.episodes.scoring.reward_scorer import punished
from headrace.facts.facts import Fact, FirstFailure, Warned, WorkerLost
from headrace.loop.assembly import groups_alone
from headrace.models.chat import ChatEncoder
from headrace.processes.joining.greeting import SILENCE, Terms
from headrace.processes.joining.same_model import agree
from headrace.processes.wire import noticed_after
from headrace.run.build import open_players, open_telemetry, plan_of
from headrace.run.config import RunConfig, read_config
from headrace.run.evaluation_sets import open_sets, read_sets
from headrace.run.hosts.bus.open_bus import open_bus, runs_on
from headrace.run.hosts.bus_messages import RunNotice
from headrace.run.hosts.rollout_host import OVERTAKEN, Deserted, HostParts, HostPatience, RolloutHost
from headrace.run.needs import check_needs
from headrace.run.resume_rules import USED_BY_HOSTS, contents_of, meaning, settings_of
from headrace.run.seats import own_sites
from headrace.run.session import run_clock
from headrace.run.starting import start_engine
from headrace.run.worker.build import open_launcher

AGAIN = 1.0
"""Seconds between two looks for a run."""


@dataclass(frozen=True, kw_only=True)
class Hosting:
    """The options of `headrace rollouts`."""

    bus: str
    run: str = ""
    """Which run, if the bus has several: its name, or its name on the bus."""
    password: str = ""
    model: str = ""
    """The directory of the run's model on this machine; empty: as the run calls it."""
    sets: Sequence[str] = ()
    """Settings of this host on top of the run's, such as `engine.threads=4`."""
    most: int = 0
    """Groups in hand at most; 0: this host's share of the run's."""
    logs: Path | None = None
    """Directory for what worker processes print; None: one that is removed in the end."""
    patience: HostPatience = HostPatience()


def serve_rollouts(hosting: Hosting) -> None:
    """Serves until the run is over, or SIGTERM or SIGINT lets this host drain. Raises HeadraceError with what ends it otherwise."""
    with ExitStack() as stack:
        place = hosting.logs or stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-rollouts-"))
        logs = Path(place) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        asyncio.run(_serve(hosting, logs))


async def _serve(hosting: Hosting, logs: Path) -> None:
    run = await _find(hosting)
    bus = open_bus(hosting.bus, run, password=hosting.password, say=say)
    who = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    host = RolloutHost(bus, who, lambda notice: open_parts(notice, hosting, logs), patience=hosting.patience, say=say)
    for name in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError, RuntimeError):
            asyncio.get_running_loop().add_signal_handler(name, _drain, host, hosting, name)
    say(f"rollout host {who} of the run {run} on {hosting.bus}")
    try:
        await host.run()
    finally:
        await bus.close()


def _drain(host: RolloutHost, hosting: Hosting, name: signal.Signals) -> None:
    say(f"{name.name}: taking no more; up to {hosting.patience.drain:g} s for what is in hand, the rest is given back")
    host.drain()
    asyncio.get_running_loop().remove_signal_handler(name)  # the second one ends the process


async def _find(hosting: Hosting) -> str:
    """Returns the run's name on the bus, as soon as the bus answers and the run is there. Raises ConfigError for a bus that cannot be used or has
    several such runs, and Deserted if there is none in time."""
    seconds, what = hosting.patience.run, f"a run{f' called {hosting.run}' if hosting.run else ''} on {hosting.bus}"
    waits = False

    def tell(message: str) -> None:
        say(f"{message} (this host waits for up to {seconds:g} s, --patience)")

    try:
        async with asyncio.timeout(seconds):
            while True:
                found = await runs_on(hosting.bus, hosting.password, say=tell)
                named = [name for name in found if _is_called(name, hosting.run)]
                if len(named) > 1:
                    raise ConfigError(f"{hosting.bus} has several runs ({', '.join(named)}); name one with --run")
                if named:
                    return named[0]
                if not waits:
                    tell(f"waiting for {what}")
                    waits = True
                await asyncio.sleep(AGAIN)
    except TimeoutError:
        raise Deserted(f"{what} was waited for {seconds:g} s (--patience), and did not come") from None


def _is_called(name: str, wanted: str) -> bool:
    return not wanted or wanted in (name, name.rpartition("-")[0])


# --- what a session needs ------------------------------------------------------------------------------------------------


async def open_parts(notice: RunNotice, hosting: Hosting, logs: Path) -> HostParts:
    """Raises ConfigError if this machine cannot serve the run."""
    config = await asyncio.to_thread(own_config, notice, hosting.sets)
    agreed = await asyncio.to_thread(agree, Terms(notice.model, notice.files), hosting.model)
    if agreed.unable:
        raise ConfigError(agreed.unable)
    assert notice.transport is not None
    encoder = (await asyncio.to_thread(ChatEncoder, Path(agreed.model_dir))).with_special_tokens(
        config.reward.special_tokens
    )
    telemetry = open_telemetry(config.watch, _Stderr(), run_clock(0.0))
    async with AsyncExitStack() as undo:
        sites = own_sites(config.code_files)
        players = await undo.enter_async_context(open_players(config, encoder, telemetry, logs=logs, sites=sites))
        read = read_sets(config, encoder)
        sets = await undo.enter_async_context(open_sets(read, encoder, telemetry, logs=logs, sites=sites))
        starting = start_engine(
            config,
            model_dir=encoder.directory,
            launcher=open_launcher(logs),
            transport=notice.transport,
            logs=logs,
            telemetry=telemetry,
        )
        engine = starting.engine
        undo.push_async_callback(engine.close)
        async with telemetry.waits.named("start", "the engine to load the model"):
            await starting.launch()
            await starting.finish(notice.manifests, notice.adapters)
        check_needs(engine.capabilities, config)
        close = undo.pop_all().aclose
    groups = groups_alone(
        plan=plan_of(config, notice.adapter),
        engine=engine,
        partial=config.partial,
        environment=players.environment,
        scorer=punished(config.reward.soft_overlong_punishment, config.rollout.max_tokens, players.scorer),
        evaluated_by=players.scorer,
        evaluation=config.eval,
        decode=encoder.decode,
        telemetry=telemetry,
    )
    return HostParts(
        engine=engine,
        interrupts=groups.interrupts,
        groups=groups,
        sets={one.name: one.with_groups(groups).groups for one in sets},
        adapter=notice.adapter,
        share=lambda hosts: hosting.most or math.ceil(config.staleness.generating / hosts),
        close=close,
        waits=telemetry.waits,
        overtaken=overtaken(notice.config["orchestration"]),
    )


def overtaken(place: Mapping[str, Any]) -> float:
    """Returns the seconds for which this host waits if it cannot fetch weights. `place`: the run's table `[orchestration]`."""
    return OVERTAKEN + (0.0 if place["trainer"] == "local" else noticed_after(SILENCE, place["reconnect"]))


def own_config(notice: RunNotice, sets: Sequence[str]) -> RunConfig:
    """The run's config on this machine: with an engine of its own. What the run measured on its own machine about threads is left out.

    Raises ConfigError where this host would sample or score otherwise than the run says: its answers count as the run's own."""
    tree = {**notice.config, "orchestration": {}}
    if "engine.threads" in tree.get("chosen", {}).get("wishes", {}):
        tree["engine"] = {**tree["engine"], "threads": 0}
    config = read_config(tree, sets)
    ours, theirs = _decisive(config), _decisive(read_config(tree))
    if differ := sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)):
        raise ConfigError(
            f"a host cannot change {', '.join(' '.join(differ).split())}: answers of all hosts are trained as those of one run. Remove it from --set, or change "
            "the run's own settings and resume it"
        )
    used = [name for name in notice.contents if name.startswith((*USED_BY_HOSTS, "eval.sets."))]
    here = contents_of(config, notice.contents, of_sets=True)
    if differ := [name for name in used if here.get(name) != notice.contents[name]]:
        raise ConfigError(
            f"the files of {', '.join(differ)} are not the run's: they differ, are not on this machine, or import packages that have "
            "other versions here. Copy those of the run's machine to the same paths, install its versions, or name theirs with --set"
        )
    return config


def _decisive(config: RunConfig) -> dict[str, Any]:
    """The settings that decide what is trained or measured, by name. Of paths only the last part counts: files may lie elsewhere here."""
    more = {name: value for name, value in settings_of(config) if name.startswith("eval.") or name == "engine.weights"}
    return {name: _without_folders(value) for name, value in {**meaning(config), **more}.items()}


def _without_folders(value: Any) -> Any:
    match value:
        case str() if value.startswith("/"):
            return value.rpartition("/")[2]
        case list() | tuple():
            return [_without_folders(element) for element in value]
        case dict():
            return {name: _without_folders(element) for name, element in value.items()}
    return value


class _Stderr:
    """An observer that prints warnings, failures and lost workers."""

    def record(self, fact: Fact) -> None:
        if isinstance(fact, Warned):
            say(fact.message)
        elif isinstance(fact, WorkerLost):
            say(f"the {fact.who} process {fact.how}; it is started again")
        elif isinstance(fact, FirstFailure):
            say(f"the first {fact.reason}: {fact.detail}")
