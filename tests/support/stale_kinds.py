"""An engine of any kind, and any way of weights, that leaves something at its old values: does the trial of C3 name it?

What is left is planted where the weights are published: the engine has loaded all that it was sent, and computes exactly what an engine
would that had not made that kind of parameter anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.algo.config import AlgoConfig
from headrace.core.errors import IdentityError
from headrace.engine.fleet.fleet import Fleet
from headrace.facts.facts import TrialChecked
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.evaluation import IdentityProbe
from headrace.loop.world.world import FactList
from headrace.run import starting
from headrace.run.config import load_config
from headrace.run.worker.build import open_launcher
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.trainer import TorchTrainer
from headrace.trainer.step.trial import hypotheses
from headrace.weight_sync.packed import lay_out

Weights = Mapping[str, torch.Tensor]
SOUND = "nothing"


def findings(
    config: dict[str, Any], model: Path, directory: Path, member: int | None = None
) -> dict[str, TrialChecked]:
    """Returns what the trial says of each planted fault, and of none (`SOUND`). `config`: of a run, whose engine and way of weights are tried.
    `member`: the only member of the fleet that has the fault."""
    torch.set_num_threads(1)
    return asyncio.run(_findings(config, model, directory, member))


async def _findings(raw: dict[str, Any], model: Path, directory: Path, member: int | None) -> dict[str, TrialChecked]:
    config, facts, clock = load_config(raw), FactList(), asyncio.get_running_loop().time
    dtype = config.engine.serving_dtype
    trainer = TorchTrainer(model, TrainConfig(dtype=dtype), AlgoConfig(name="grpo"), seed=0)
    draw = torch.Generator().manual_seed(1)
    length = min(config.engine.context_length, 100)
    pieces = torch.randint(3, 45, (256 // length, length), generator=draw).tolist()

    weights = lambda: {name: one.detach().clone() for name, one in trainer.parameters()}  # noqa: E731
    before = weights()
    trainer.begin_trial()
    changed = weights()
    scores = trainer.end_trial(pieces)

    manifests = {"": lay_out(trainer.parameters(), getattr(torch, dtype), trainer.tied)}
    (directory / "logs").mkdir()
    transport = starting.transport_of(config, directory / "logs")
    sender = transport.sender(manifests)
    telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 1000.0, 2000.0))
    probe = IdentityProbe(pieces[0], 1, dtype, telemetry, trial=pieces)
    begun = starting.start_engine(
        config,
        model_dir=model,
        launcher=open_launcher(directory / "logs"),
        transport=transport,
        logs=directory / "logs",
        telemetry=telemetry,
    )
    try:
        await begun.launch()
        await begun.finish(manifests, 0)
        engine, version, found = begun.engine, 0, dict[str, TrialChecked]()
        await engine.load(sender.send(version, before.items()))
        for label, names in {SOUND: [], **hypotheses(list(before))}.items():
            kept = {name: before[name] if name in names else one for name, one in changed.items()}
            version += 1
            if member is None:
                await engine.load(sender.send(version, kept.items()))
            else:
                assert isinstance(engine, Fleet)
                for number, part in enumerate(engine.members):
                    await part.engine.load(sender.send(version, (kept if number == member else changed).items()))
            with contextlib.suppress(IdentityError):
                await probe.try_weights(engine, version, scores)
            checked = facts.of(TrialChecked)
            found[label] = next((fact for fact in checked if not fact.ok), checked[0])
            facts.facts.clear()
        return found
    finally:
        await begun.engine.close()
        transport.close()


def check_named(found: dict[str, TrialChecked]) -> None:
    """Checks that a sound update passes, that each kind of it is proven, and that each that stays is named. Biases may be too small for that beside
    the rounding of bfloat16; that of keys adds the same to a query's products with all keys, and changes next to nothing at any precision."""
    sound = found.pop(SOUND)
    assert sound.ok and len(found) == sound.kinds >= 13, sound
    assert all(label.endswith("_proj.bias") for label in sound.unseen), sound
    for label, fact in found.items():
        if label not in sound.unseen:
            assert not fact.ok and fact.stale == label, f"{label} stayed, found: {fact}"
