"""The probe of C3: the engine's log-probs of a fixed prompt against the trainer's, at one version.

The fingerprint proves that the engine holds the published bytes; the probe that it computes with them what the trainer does.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.fleet.fleet import Fleet
from headrace.errors import IdentityError
from headrace.observe.facts import IdentityChecked
from headrace.observe.telemetry import Telemetry
from headrace.protocols import Engine, Trainer

PROBE = "The quick brown fox jumps over the lazy dog, and 7 times 6 is 42."
"""The probe's text, the same in all runs."""

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest mean |difference| per token, in nats, that rounding can cause, by serving dtype (0.01 to 0.06 is usual in bf16)."""

ADVICE = 'Run with engine.path = "hf"; if that agrees, the fused decoder is wrong for this model: please report it.'
ADVICE_SERVER = (
    "Its server has not applied the weights or the adapter that it reported as loaded (its log may have the reason), or it computes "
    'this model in another way: run with engine.kind = "native"; if that agrees, the trainer is right and the server is not.'
)


class IdentityProbe:
    def __init__(
        self,
        tokens: Sequence[int],
        every: int,
        tolerance: float,
        telemetry: Telemetry,
        adapter: str = "",
        *,
        served: bool = False,
    ) -> None:
        """`every`: versions between two probes; 0 switches them off. `adapter`: the policy that is probed. `served`: whether the engine
        is a server."""
        self._tokens, self._every, self._tolerance = tuple(tokens), every, tolerance
        self._telemetry, self._adapter = telemetry, adapter
        self._advice = ADVICE_SERVER if served else ADVICE

    async def trainer_side(self, trainer: Trainer, version: int, always: bool = False) -> list[float] | None:
        """The log-probs that the engine must compute; None if this version is not probed. `always`: probe regardless of its number."""
        due = bool(self._every) and (always or version % self._every == 0)
        return await trainer.score(self._tokens, self._adapter) if due else None

    async def engine_side(self, engine: Engine, version: int, expected: list[float] | None) -> float | None:
        """Returns the root mean square of the differences, in nats; None if this version is not probed.

        Raises `IdentityError` when the served policy is not the trained one. Every member of a fleet is probed; it goes on without those that
        fail, as long as one is left.
        """
        if expected is None:
            return None
        if isinstance(engine, Fleet):
            check = lambda part: self._difference(part, version, expected)  # noqa: E731
            return await engine.examine(version, check, self._adapter)
        return await self._difference(engine, version, expected)

    async def _difference(self, engine: Engine, version: int, expected: Sequence[float]) -> float:
        completion = await engine.score(self._tokens, self._adapter)
        found = completion.prompt_logprobs
        if found is None or completion.spans[0].version != version:
            under = f"under version {completion.spans[0].version}" if completion.spans else "not at all"
            raise IdentityError(
                f"the engine was to score the probe under version {version}, and did it {under} {completion.error}".rstrip()
            )
        differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
        mean = sum(differences) / len(differences)
        ok = mean <= self._tolerance  # False for NaN too
        self._telemetry.record(
            IdentityChecked(
                t=self._telemetry.clock(),
                version=version,
                mean_abs_diff=mean,
                max_abs_diff=max(differences),
                tolerance=self._tolerance,
                ok=ok,
            )
        )
        if not ok:
            raise IdentityError(
                f"at version {version} the engine's log-probs of the probe differ from the trainer's by {mean:.3g} on average "
                f"(tolerance {self._tolerance:g}): it does not compute the policy that is trained. {self._advice}"
            )
        return (sum(gap * gap for gap in differences) / len(differences)) ** 0.5
