"""The words and variables that start a server of each kind, from the settings of the run's engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.engine.config import OF_FLEETS, OF_SERVERS, EngineConfig
from headrace.settings.interpreters import Found, foreign_variables

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank (`vllm/config/lora.py`)."""
HOST = "127.0.0.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
CLOSING = 5
"""Seconds that a server's workers have to close."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The facts that a server needs beside the settings of the engine."""

    model: Path
    port: int
    token: str
    token_file: Path
    """Holds the token, for servers that take none from a variable."""
    adapters: int
    """Adapters that are served at once."""
    rank: int
    """The largest rank among them."""
    adapted: Sequence[str] = ()
    """Names of the modules that adapters may adapt, without their path."""
    fetches: bool = False
    """Whether it fetches new weights over HTTP instead of reading files."""


@dataclass(frozen=True)
class Command:
    words: Sequence[str]
    variables: Mapping[str, str]
    """The whole environment."""


def command(config: EngineConfig, found: Found, place: Place) -> Command:
    words, variables = _COMMANDS[config.kind](config, found, place)
    return Command([*words, *config.server_args], foreign_variables(found.python) | variables | visible(config.gpus))


def visible(gpus: Sequence[int]) -> dict[str, str]:
    """Returns the variable that leaves only these GPUs. Raises ConfigError if they are not among those that this process may use."""
    there = [one.strip() for one in os.environ.get(VISIBLE, "").split(",") if one.strip()]
    if there and gpus and max(gpus) >= len(there):
        raise ConfigError(
            f"engine.gpus names GPU {max(gpus)}, and {VISIBLE}={os.environ[VISIBLE]} leaves {len(there)}, which count from 0"
        )
    return {VISIBLE: ",".join(there[one] if there else str(one) for one in gpus)} if gpus else {}


def _vllm(config: EngineConfig, found: Found, place: Place) -> tuple[list[str], dict[str, str]]:
    # The command-line program reads the version of a distribution named vllm, which the build for CPUs is not.
    start = ["vllm.entrypoints.cli.main", "serve"] if found.distribution == "vllm" else [_BY_MODULE, "--model"]
    words = [found.python, "-m", *start, str(place.model), "--host", HOST, "--port", str(place.port)]
    words += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
    words += ["--dtype", config.serving_dtype, "--max-num-seqs", str(config.max_running)]
    words += ["--max-model-len", str(config.context_length + 1)]  # behind a prompt that it scores it samples a token
    words += ["--kv-cache-memory-bytes", str(int(config.kv_gib * 2**30))]
    # By default it kills its workers at once, and the one that has written files of adapters does not delete them.
    words += ["--shutdown-timeout", str(CLOSING)]
    if adapters := max(config.max_adapters, place.adapters):
        rank = next((one for one in RANKS if one >= place.rank), place.rank)
        # One more: during an update the version before is still loaded.
        words += ["--enable-lora", "--max-loras", str(adapters + 1), "--max-lora-rank", str(rank)]
        # Without this vLLM wraps the output head as well; on a CPU its wrapper then takes the rows of a prompt that is scored for those of
        # sampled tokens, and the engine ends with an error of einsum wherever such a request meets others (seen in 0.32).
        if place.adapted and found.for_cpus:
            words += ["--lora-target-modules", *place.adapted]
    if place.fetches:
        words += ["--weight-transfer-config", json.dumps({"backend": "headrace"})]
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_API_KEY": place.token,
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
    }
    if config.cores:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, config.cores))
    return words, variables


_BY_MODULE = "vllm.entrypoints.openai.api_server"


def _headrace(config: EngineConfig, found: Found, place: Place) -> tuple[list[str], dict[str, str]]:
    words = [found.python, "-m", "headrace", "serve", str(place.model), "--host", HOST, "--port", str(place.port)]
    words += ["--token-file", str(place.token_file), "--adapters", str(max(config.max_adapters, place.adapters))]
    usual = EngineConfig()
    own = [
        field.name for field in fields(config) if field.name not in ("kind", "max_adapters", *OF_SERVERS, *OF_FLEETS)
    ]
    values = {name: getattr(config, name) for name in own} | {"dtype": config.serving_dtype}
    for name, value in values.items():
        if value != getattr(usual, name):
            words += ["--set", f"engine.{name}={json.dumps(value)}"]
    return words, {}


_COMMANDS: dict[str, Callable[[EngineConfig, Found, Place], tuple[list[str], dict[str, str]]]] = {
    "headrace": _headrace,
    "vllm": _vllm,
}
"""How a server of each `engine.kind` is started."""
