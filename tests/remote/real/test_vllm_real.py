"""Whole runs with the real vLLM 0.32 on the CPU, which the runs start themselves. Its interpreter is $HEADRACE_VLLM_PYTHON, or that of
.venv-bench (`make bench-setup`); without it they are skipped. A minute each on a quiet machine, most of it the start of vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest
from real_vllm import KINDS, MARKS, WIDE, changed, config_for, reference, save_model, speaks, started, updates, when

import headrace
from headrace.core.errors import ConfigError, IdentityError
from headrace.core.types import Completion, Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialects.vllm import VllmDialect
from headrace.engine.remote.server_kind import Described
from headrace.facts.facts import IdentityChecked, RunEnded, TrialChecked, WeightsLive, WorkerLost
from headrace.facts.records import StepRow
from headrace.loop.world.world import FactList
from headrace.models.tokenizer import end_tokens
from support.runs.processes import alive
from support.server_processes import servers
from support.stale_kinds import check_named, findings
from support.tiny_run import of, when_step

pytestmark = MARKS

LENGTH = 230
"""Tokens of a completion that is still under way when an update begins."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen2-64"), tiny_tokenizer)


def checked(run: Path, steps: int, deaths: int) -> None:
    (ended,) = of(run, RunEnded)
    assert ended.reason == "finished" and ended.accounting.balance() == 0, ended.accounting
    rows, probes = of(run, StepRow), of(run, IdentityChecked)
    assert len(rows) == steps and max(lag for row in rows for lag in row.lags) <= 1
    assert {probe.version for probe in probes} == set(range(steps + 1))
    assert all(probe.ok and probe.mean_abs_diff < 1e-3 for probe in probes)
    assert len(of(run, WorkerLost)) == deaths
    assert not servers(), "all of its processes have ended with the run"


def paused() -> bool:
    """Whether the run's server is in the middle of an update."""
    for leader in servers():
        words = Path(f"/proc/{leader}/cmdline").read_text().split("\0")
        url = f"http://127.0.0.1:{words[words.index('--port') + 1]}/is_paused"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(json.load(answer)["is_paused"])
        except OSError:
            return False
    return False


def kill() -> None:
    ((server, *_),) = servers().values()
    os.kill(server, signal.SIGKILL)


def test_full_weights_and_a_server_that_is_killed_while_it_generates_and_in_an_update(
    model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"

    def twice() -> None:
        kill()
        when(lambda: bool(of(run, WorkerLost)), lambda: None, every=0.2)
        live = len(of(run, WeightsLive))
        when(lambda: len(of(run, WeightsLive)) > live, lambda: None, every=0.2)
        when(paused, kill)

    killer = when_step(run, 1, twice)
    headrace.train(config_for(tmp_path, model))
    killer.join()
    checked(run, steps=5, deaths=2)
    assert [update.update.version for update in of(run, WeightsLive)] == list(range(6))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_kind_that_stays_is_named(tiny_tokenizer: Path, tmp_path: Path, dtype: str) -> None:
    model = save_model(tmp_path / "model", tiny_tokenizer, spread=WIDE)
    config = config_for(tmp_path, model)
    config["engine"]["dtype"] = dtype
    check_named(findings(config, model, tmp_path))


def test_an_adapter_is_trained(model: Path, tmp_path: Path) -> None:
    train = {"steps": 4, "learning_rate": 1e-2}
    headrace.train({**config_for(tmp_path, model, lora={"rank": 4}), "train": {"dtype": "float32", **train}})
    run = tmp_path / "runs" / "tiny"
    checked(run, steps=4, deaths=0)


def test_nothing_of_vllm_outlives_a_run_that_is_killed(model: Path, tmp_path: Path) -> None:
    """Not even its engine process, which outlives a server that is killed."""
    script = "import headrace, json, sys; headrace.train(json.loads(sys.argv[1]))"
    config = config_for(tmp_path, model)
    config["train"]["steps"] = 1000
    run = subprocess.Popen([sys.executable, "-c", script, json.dumps(config)], stdout=subprocess.DEVNULL)
    pids: list[int] = []

    def up() -> bool:
        """Whether it has trained a step, and so all of its processes are there."""
        assert run.poll() is None
        pids[:] = [pid for leader, members in servers(run.pid).items() for pid in (leader, *members)]
        return (
            bool(of(tmp_path / "runs" / "tiny", StepRow)) if (tmp_path / "runs/tiny/metrics.jsonl").exists() else False
        )

    try:
        when(up, run.kill, every=0.5)
    finally:
        run.kill()
        run.wait()
    assert len(pids) >= 3, "the guard, the server, and its engine process"
    when(lambda: not any(map(alive, pids)), lambda: None, every=0.1)
    assert not any(map(alive, pids))


def test_every_token_is_of_its_version_when_weights_change_while_requests_stream(model: Path, tmp_path: Path) -> None:
    models = [model, changed(model, tmp_path / "other")]
    first, second = updates(models)
    prompts = {f"r{number}": (1, 7 + number, 20) for number in range(6)}

    async def go() -> list[Completion]:
        config = config_for(tmp_path, model)
        config["engine"]["context_length"] = LENGTH + 10
        async with started(config, model, tmp_path, FactList()) as engine:
            await engine.load(first)
            drawn = Sampling(max_tokens=LENGTH, ignore_eos=True)
            asked = [
                asyncio.ensure_future(engine.generate(Request(name, prompt, drawn))) for name, prompt in prompts.items()
            ]
            while not any(one.done() for one in asked):
                had = engine.unfinished()
                if all(name in had and had[name].tokens for name in prompts):
                    break
                await asyncio.sleep(0.001)
            await engine.load(second)
            return await asyncio.gather(*asked)

    for prompt, completion in zip(prompts.values(), asyncio.run(go()), strict=True):
        assert [(span.version, span.kv_version) for span in completion.spans] == [(0, 0), (1, 1)]
        assert len(completion.tokens) == LENGTH and completion.stop == "length"
        told = [reference(model, prompt, completion) for model in models]
        versions = completion.versions()
        own = [abs(told[version][t] - completion.logprobs[t]) for t, version in enumerate(versions)]
        other = [abs(told[1 - version][t] - completion.logprobs[t]) for t, version in enumerate(versions)]
        assert max(own) < 1e-4 and max(other) > 0.1, (max(own), max(other))
    assert not servers()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["whole", "adapter"])
def test_models_as_people_have_them_are_served_as_they_are_trained(
    kind: str, lora: dict[str, int], tmp_path: Path, tiny_tokenizer: Path
) -> None:
    """The trial sees every kind of parameter but one that changes no log-prob (a bias of keys)."""
    model = save_model(tmp_path / kind, tiny_tokenizer, kind)
    headrace.train(config_for(tmp_path, model, train={"steps": 3, "learning_rate": 1e-3}, lora=lora))
    run = tmp_path / "runs" / "tiny"
    (trial,), probes = of(run, TrialChecked), of(run, IdentityChecked)
    assert trial.ok and all(name.endswith("k_proj.bias") for name in trial.unseen), trial
    assert {probe.version for probe in probes} == set(range(4)) and all(probe.ok for probe in probes)
    assert max(probe.mean_abs_diff for probe in probes) < 1e-6 and not servers()


class _Forgetful(VllmDialect):
    """Has vLLM load the first adapter under the name of every later one."""

    def __init__(self, server: Described, kept: Path) -> None:
        super().__init__(end_tokens(server.model_dir), server.check_every)
        self._kept = kept

    async def _load_adapter(self, connection: Connection, update: WeightUpdate, adapter: str, seconds: float) -> None:
        if not self._kept.exists():
            await asyncio.to_thread(shutil.copytree, update.where["path"], self._kept)
        kept = msgspec.structs.replace(update, where={"path": str(self._kept)})
        await super()._load_adapter(connection, kept, adapter, seconds)


def test_the_probe_stops_a_run_whose_adapter_vllm_has_not_loaded(model: Path, tmp_path: Path, monkeypatch) -> None:
    speaks(monkeypatch, lambda server: _Forgetful(server, tmp_path / "first"))
    config = config_for(tmp_path, model, lora={"rank": 4})
    config["train"] = {**config["train"], "learning_rate": 0.1}
    with pytest.raises(
        IdentityError, match=r"does not compute the policy that is trained\. Its server has not applied"
    ):
        headrace.train(config)
    assert not servers()


class _Killed(VllmDialect):
    """Its server is killed while it loads the adapter of one version, once."""

    at, killed = 2, False

    async def _load_adapter(self, connection: Connection, update: WeightUpdate, adapter: str, seconds: float) -> None:
        loading = asyncio.ensure_future(super()._load_adapter(connection, update, adapter, seconds))
        if update.version >= self.at and not self.killed:
            type(self).killed = True
            await asyncio.sleep(0)  # the request is on its way
            kill()
        await loading


def test_an_adapter_and_a_server_that_is_killed_while_it_generates_and_while_it_loads(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process knows no adapter. It samples with the one that is live, and not without one or with an older one: at this learning
    rate the probe of each version tells them apart."""
    run = tmp_path / "runs" / "tiny"
    monkeypatch.setattr(_Killed, "killed", False)
    speaks(monkeypatch, lambda server: _Killed(end_tokens(server.model_dir), server.check_every))

    def again() -> None:
        live = len(of(run, WeightsLive))
        when(lambda: len(of(run, WorkerLost)) == 1 and len(of(run, WeightsLive)) > live, kill, every=0.2)

    killer = when_step(run, 1, again)
    headrace.train(config_for(tmp_path, model, lora={"rank": 4}, train={"steps": 6, "learning_rate": 0.05}))
    killer.join()
    checked(run, steps=6, deaths=2)
    live = [update.update for update in of(run, WeightsLive)]
    assert [one.version for one in live] == [0, *range(7)]
    assert [one.kind for one in live] == ["full", *["adapter"] * 7]
    assert all("killed by SIGKILL" in fact.how for fact in of(run, WorkerLost)), of(run, WorkerLost)


class _Careless(VllmDialect):
    """Has vLLM read all tensors but the last norm, from the second version on."""

    _first: Path | None = None

    async def _reload(self, connection: Connection, path: str, seconds: float) -> None:
        from safetensors.torch import load_file, save_file

        if self._first is None:
            self._first = Path(path).parent / "first.safetensors"
            await asyncio.to_thread(shutil.copy, Path(path) / "model.safetensors", self._first)
        tensors = load_file(Path(path) / "model.safetensors")
        mixed = Path(path).parent / "mixed"
        mixed.mkdir(exist_ok=True)
        old = load_file(self._first)["model.norm.weight"]
        save_file({**tensors, "model.norm.weight": old}, mixed / "model.safetensors")
        await super()._reload(connection, str(mixed), seconds)


def test_the_checksums_stop_a_run_of_which_vllm_has_not_loaded_one_norm(
    model: Path, tmp_path: Path, monkeypatch
) -> None:
    """Its effect is below what the probe allows."""
    speaks(monkeypatch, lambda server: _Careless(end_tokens(server.model_dir), server.check_every))
    config = config_for(tmp_path, model)
    config["train"] = {**config["train"], "learning_rate": 1e-5}
    config["watch"] = {**config["watch"], "trial": False}  # whose first norm would be kept
    with pytest.raises(IdentityError, match=r"version 1, and 1 of \d+ checksums .*model\.norm\.weight"):
        headrace.train(config)
    assert all(probe.ok for probe in of(tmp_path / "runs" / "tiny", IdentityChecked)) and not servers()


def test_a_model_that_it_cannot_compute_is_refused_at_its_first_request(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """It comes up all the same, and its log ends with notices."""
    model = save_model(tmp_path / "llama-16", tiny_tokenizer, "llama", head=16)
    with pytest.raises(
        ConfigError, match="RuntimeError: Unsupported CPU attention configuration: head_dim=16"
    ) as refused:
        headrace.train(config_for(tmp_path, model))
    assert "came up and ended before it had served a request" in str(refused.value)
    assert not of(tmp_path / "runs" / "tiny", WorkerLost) and not servers()
