"""The speeds of the parts: measured (`calibrate.py`), taken from a run (`from_run.py`), or computed (`hardware.py`)."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import msgspec

from headrace.core.errors import ConfigError
from headrace.core.types import Struct
from headrace.loop.world.surroundings import Distribution


class EngineRates(Struct, frozen=True):
    """The speeds of one replica. A forward pass gives one token to every running sequence, and takes

    decode(running) + context · (tokens in the caches of the running sequences) + prefill · (prompt tokens computed in it)
        + request · (sequences that begin with it)  seconds.
    """

    decode: tuple[tuple[float, float], ...]
    """The batch curve: (running sequences, seconds of a pass), ascending. It is linear in between, and beyond the last point."""
    prefill: float = 0.0
    context: float = 0.0
    max_running: int = 64
    kv_tokens: float = float("inf")
    """Tokens of prompts and completions that the KV cache holds."""
    verify: float = 0.0
    """Seconds from a published update to the swap in an otherwise idle engine: transfer, fingerprint, packing."""
    verify_slows: float = 1.0
    """Factor by which verification slows down during generation, and a pass during verification."""
    swap: float = 0.0
    """Seconds for which the swap stops generation."""
    request: float = 0.0
    """Seconds of a sequence beside its tokens: messages, a row, the way back."""
    gpus: int = 1

    def pass_seconds(self, running: float) -> float:
        return interpolate(self.decode, running)

    def tokens_per_second(self, running: int, context: float = 0.0) -> float:
        """Returns the rate of all sequences together. `context`: tokens in the cache of each."""
        return running / (self.pass_seconds(running) + self.context * running * context)


class TrainerRates(Struct, frozen=True):
    """The speeds of the whole pool: a step of N forwarded tokens takes `step + token · N` seconds."""

    token: float
    step: float = 0.0
    publish: float = 0.0
    """Seconds in which new weights are copied; the next step waits for them."""
    send: float = 0.0
    """Seconds from the copy to the update that an engine can load: its fingerprint or difference, computed beside the next step."""
    send_slows: float = 1.0
    """Factor by which these seconds and those of a step beside them get longer."""
    save: float = 0.0
    score: float = 0.0
    """Seconds of the probe of C3."""
    gpus: int = 1


class Rates(Struct, frozen=True):
    engine: EngineRates
    trainer: TrainerRates
    engine_slowed: float = 1.0
    """Factor by which a pass takes longer while the trainer works, if both share cores, caches, memory or power."""
    trainer_slowed: float = 1.0
    """Factor by which the trainer's work takes longer while the engine works."""
    overhead: float = 0.0
    """Seconds between a group's last token and its place in the buffer that are spent neither in engine nor in
    scorer."""
    completions: Distribution | None = None
    """Lengths of completions, if they were measured."""
    prompts: Distribution | None = None
    turns: Distribution | None = None
    """Turns of a rollout, if a run of several turns was measured; then `completions` are those of one turn."""
    tools: Distribution | None = None
    """Seconds between two turns."""
    results: Distribution | None = None
    """Tokens between two turns."""
    source: str = ""
    """The source of these rates, in words."""
    model: str = ""


def interpolate(points: tuple[tuple[float, float], ...], x: float) -> float:
    """Interpolates linearly; below the first point it returns its value, beyond the last it continues with the last slope."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    after = min(bisect_right(points, (x, 0.0)), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def save_rates(rates: Rates, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # JSON has no infinity: an unlimited value is left out.
    text = msgspec.to_builtins(rates)
    if text["engine"]["kv_tokens"] == float("inf"):
        del text["engine"]["kv_tokens"]
    path.write_bytes(msgspec.json.format(msgspec.json.encode(text), indent=1) + b"\n")


def load_rates(path: Path) -> Rates:
    """Reads rates. Raises ConfigError with the file and the problem."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rates)
    except FileNotFoundError:
        raise ConfigError(
            f"there are no measured rates in {path}: measure them with headrace plan CONFIG.toml --calibrate, or name "
            "the hardware with --hardware h100 --model 7b"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as rates ({error}); write it again with headrace plan --calibrate"
        ) from None
