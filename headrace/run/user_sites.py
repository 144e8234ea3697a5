"""The machines on which a run's reward functions and environments run: this one, and those of workers that join (`orchestration.scorers`,
`orchestration.environments`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.core.protocols import Job, Launcher
from headrace.episodes.environments.function import function_settings
from headrace.facts.telemetry import Telemetry
from headrace.processes.asked_process import HERE, OWN_SITE, Sites
from headrace.processes.joining.greeting import USER_CODE, Kind, Terms
from headrace.processes.joining.same_model import code_terms
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.run.clients.hosted_site import HostedSite
from headrace.run.config import RunConfig
from headrace.run.hosts.user_hosts.host_messages import RewardsLoaded, UserHostStart


@dataclass(frozen=True)
class UserSites:
    """The machines of each kind of code."""

    scorers: Sites = HERE
    environments: Sites = HERE
    hosts: Sequence[tuple[Kind, HostedSite]] = ()
    """Those elsewhere, by what they offer."""

    async def open(self, launcher: Launcher, config: RunConfig) -> None:
        """Returns when each has a worker. Raises StalledError and WorkerDied."""
        for kind, host in self.hosts:
            await host.open(launcher, start_of(config, kind))

    async def close(self) -> None:
        await asyncio.gather(*(host.close() for _, host in self.hosts))


ONLY_HERE = UserSites()


def user_sites(place: OrchestrationConfig, telemetry: Telemetry) -> UserSites:
    """The machines of a run. Those elsewhere are up after `open`."""
    hosts: list[tuple[Kind, HostedSite]] = []
    sites: dict[Kind, Sites] = {}
    for kind, names in place.hosts.items():
        own = [HostedSite(Job(kind, name), telemetry) for name in names]
        hosts += [(kind, one) for one in own]
        sites[kind] = _sites(kind, own, place.also_here, telemetry)
    return UserSites(sites.get("scorer", HERE), sites.get("environment", HERE), hosts)


def _sites(kind: Kind, hosts: Sequence[HostedSite], also_here: bool, telemetry: Telemetry) -> Sites:
    turned = asyncio.Event()

    async def until_up() -> None:
        async with telemetry.waits.named("the user's code", f"a worker that offers {kind}"):
            while not any(host.up for host in hosts):
                turned.clear()
                await turned.wait()

    sites = Sites([*hosts, *([OWN_SITE] if also_here else [])], until_up)
    sites.listen(turned.set)
    for host in hosts:
        host.changed = sites.changed
    return sites


def terms_of_code(config: RunConfig) -> dict[Kind, Terms]:
    """The user's files that workers must have, by what they offer. Raises ConfigError for one that cannot be read."""
    return {kind: code_terms(_files(config, kind)) for kind in USER_CODE if kind in config.orchestration.hosts}


def start_of(config: RunConfig, kind: Kind) -> UserHostStart:
    files = code_terms(_files(config, kind)).files
    if kind == "scorer":
        loads = [
            RewardsLoaded(tuple(spec.function for spec in run.reward.specs), run.sandbox.settings.as_text())
            for run in config.runs
            if run.reward.specs
        ]
        return UserHostStart(files=files, rewards=tuple(loads))
    settings = [function_settings(run.environment, run.sandbox.settings) for run in config.runs]
    return UserHostStart(files=files, environments=tuple(settings))


def _files(config: RunConfig, kind: Kind) -> Iterator[str]:
    """The paths of the files that the settings name."""
    for run in config.runs:
        named = [spec.function for spec in run.reward.specs]
        if kind == "environment":
            named = [run.environment.function or run.environment.name]
        for one in named:
            path = one if one.endswith(".py") else one.rpartition(":")[0]
            if path.endswith(".py"):
                yield path
