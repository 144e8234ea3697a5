"""A policy whose weights are quantised in the engine (`engine.weights`): what corrects for it in training, and what it cannot be combined with.

The log-probs that are recorded are those of the quantised policy, which sampled. So whatever weighs tokens by their ratio to the sampler's log-probs
corrects for quantisation as it does for lag, and no further weight is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.algo.config import AlgoConfig
from headrace.engine.config import EngineConfig
from headrace.settings.process_config import WatchConfig
from headrace.trainer.config import TrainConfig

_WEIGHTS = {"truncate": "truncated importance sampling (TIS)", "mask": "masked importance sampling (MIS)"}


def correction_of(algo: AlgoConfig) -> str:
    """Returns what corrects for the gap between sampler and trainer, in words; empty if nothing does."""
    recipe = algo.recipe
    correction, loss = recipe.correction, recipe.loss
    if correction.mode != "none":
        return (
            f"{_WEIGHTS[correction.mode]} by {correction.level}, weights of {correction.low:g} to {correction.high:g}"
        )
    if recipe.old == "sampler" and loss.weighs:
        return f"the ratio in algo.loss = {loss}, which is taken to the sampler's own log-probs"
    return ""


def quantised_problems(engine: EngineConfig, algo: AlgoConfig, train: TrainConfig, watch: WatchConfig) -> Iterator[str]:
    """Yields a sentence for each setting that a quantised policy excludes. (`engine_problems` has those of the engine itself.)"""
    if engine.weights == "published":
        return
    asked = f'engine.weights = "{engine.weights}"'
    if train.parity == "bitwise":
        yield (
            f'{asked} samples from another policy than the trainer\'s, and train.parity = "bitwise" asks for the same one, bit for bit; set '
            'train.parity = "off", or engine.weights = "published"'
        )
    if not watch.identity_every:
        yield (
            f"{asked} is measured against the policy that is trained at every version, and watch.identity_every = 0 switches that off; set it to 1, "
            'or engine.weights = "published"'
        )
    if not correction_of(algo) and algo.correction.mode is None:
        anchored = algo.recipe.loss.anchored and algo.recipe.old != "sampler"
        remedy = (
            'set algo.correction.mode = "truncate" (TIS) or "mask" (MIS)'
            if anchored
            else "use algo.name = grpo, tis or mis"
        )
        yield (
            f"{asked} samples from another policy than the one that is trained, and algo.name = {algo.name} with algo.old = {algo.recipe.old} and "
            f'algo.loss = {algo.recipe.loss} weighs no token for that; {remedy}, or algo.correction.mode = "none" to train without a correction'
        )


def quantised_words(engine: EngineConfig, algo: AlgoConfig, watch: WatchConfig) -> str:
    """Returns what the run makes of a quantised policy, in a sentence; empty if the policy is served as it is published."""
    if engine.weights == "published":
        return ""
    corrected = correction_of(algo) or "nothing, as algo.correction.mode = none asks"
    return (
        f"the sampler has {engine.weights} weights (engine.weights); {corrected} corrects for it; every version is measured, and the run ends where "
        f"log-probs differ by more than {watch.mismatch:g} nats a token (watch.mismatch)"
    )
