"""How fast the parts are: measured here (`calibrate.py`), taken from a run (`from_run.py`), or computed (`hardware.py`)."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import msgspec

from headrace.errors import ConfigError
from headrace.simulate.distributions import Distribution
from headrace.types import Struct


class EngineRates(Struct, frozen=True):
    """Of one replica. A forward pass gives one token to every sequence that runs, and takes

    decode(running) + context · (tokens in the caches of those that run) + prefill · (prompt tokens computed in it)  seconds.
    """

    decode: tuple[tuple[float, float], ...]
    """The batch curve: (sequences that run, seconds of a pass), ascending. Linear in between, and on beyond the last."""
    prefill: float = 0.0
    context: float = 0.0
    max_running: int = 64
    kv_tokens: float = float("inf")
    """Room for prompts and completions."""
    verify: float = 0.0
    """Seconds from a published update to the swap, of an engine that does nothing else: transfer, fingerprint, packing."""
    verify_slows: float = 1.0
    """How many times longer this takes beside generation, and a pass beside this."""
    swap: float = 0.0
    """Seconds in which it stands still."""
    gpus: int = 1

    def pass_seconds(self, running: float) -> float:
        return interpolate(self.decode, running)

    def tokens_per_second(self, running: int, context: float = 0.0) -> float:
        """Of all together, with so many tokens in each cache."""
        return running / (self.pass_seconds(running) + self.context * running * context)


class TrainerRates(Struct, frozen=True):
    """Of the whole pool: a step of N forwarded tokens takes `step + token · N` seconds."""

    token: float
    step: float = 0.0
    publish: float = 0.0
    save: float = 0.0
    score: float = 0.0
    """Of the probe of C3."""
    gpus: int = 1


class Rates(Struct, frozen=True):
    engine: EngineRates
    trainer: TrainerRates
    engine_slowed: float = 1.0
    """How many times longer a pass takes while the trainer works: where both share cores, caches, memory or power."""
    trainer_slowed: float = 1.0
    """And the trainer's work while the engine works."""
    overhead: float = 0.0
    """Seconds between a group's last token and its place in the buffer that are neither engine's nor scorer's."""
    completions: Distribution | None = None
    """Lengths of completions, where they were measured."""
    prompts: Distribution | None = None
    source: str = ""
    """Where these rates come from, in words."""
    model: str = ""


def interpolate(points: tuple[tuple[float, float], ...], x: float) -> float:
    """Piecewise-linear; below the first point its value, beyond the last its last slope."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    after = min(bisect_right(points, (x, 0.0)), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def save_rates(rates: Rates, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # JSON knows no infinity: what is unlimited is left out.
    text = msgspec.to_builtins(rates)
    if text["engine"]["kv_tokens"] == float("inf"):
        del text["engine"]["kv_tokens"]
    path.write_bytes(msgspec.json.format(msgspec.json.encode(text), indent=1) + b"\n")


def load_rates(path: Path) -> Rates:
    """Raises ConfigError naming the file and what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rates)
    except FileNotFoundError:
        raise ConfigError(
            f"there are no measured rates in {path}: measure this machine's with headrace plan CONFIG.toml --calibrate, or name "
            "the hardware with --hardware h100 --model 7b"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} holds no rates ({error}); write it again with headrace plan --calibrate") from None
