"""`headrace doctor`: shows what is installed, what would run where, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headrace.engine.remote.server_kind import startable_servers
from headrace.engine.servers.installed import look, places
from headrace.episodes.environments.verifiers.taskset_environment import REMEDY as VERIFIERS
from headrace.episodes.environments.verifiers.taskset_environment import lacking, look_for_verifiers
from headrace.native.resources import memory, usable_cores
from headrace.run.rehearsal.machine import ask_torch, torch_facts
from headrace.settings.extras import EXTRAS, install, is_installed, pip_install

State = Literal["ok", "note", "bad"]

GIB = 1024**3
NEEDED_MEMORY = 6 * GIB
"""Memory of the demo's 135 M parameters: fp32 weights, gradients, two AdamW moments, two published copies and the KV budget."""
NEEDED_DISK = 4 * GIB


class DoctorFinding(NamedTuple):
    what: str
    state: State
    value: str
    remedy: str = ""


def examine(full: bool = False, pythons: Sequence[str] = ()) -> int:
    """Prints the table. Returns 0 if a run can start, 1 if something is missing. `full`: also read and verify cached models. `pythons`:
    other interpreters in which engines and verifiers may be installed."""
    probe = ask_torch()
    rest = [*_machine(), *_disks()]  # while the probe imports torch
    packages = [*_packages(), *_extras()]
    models = list(_models(full))
    torch = torch_facts(probe)
    sections = {
        "Software": [_python(), *torch_findings(torch), *_kernels(), *packages],
        "Engines": list(engine_findings(places(pythons))),
        "Environments": list(taskset_findings(places(pythons))),
        "Machine": rest,
        "Models": models,
        "Sandbox": list(sandbox_findings()),
        "What would run where": list(_placement(torch)),
    }
    return print_findings(sections)


# --- software --------------------------------------------------------------------------------------------------------


def _python() -> DoctorFinding:
    return DoctorFinding("Python", "ok", ".".join(map(str, sys.version_info[:3])))


def torch_findings(torch: dict[str, Any] | str) -> Iterator[DoctorFinding]:
    if isinstance(torch, str):
        yield DoctorFinding("torch", "bad", torch, f"{pip_install()} 'torch>=2.11,<2.14'")
        return
    yield _in_range("torch", torch["version"], f", {torch['threads']} threads, built for {_built_for(torch)}")
    fast = [name for key, name in (("amx", "AMX"), ("avx512_bf16", "AVX512-BF16")) if torch[key]]
    if torch["cuda"]:
        names = ", ".join(f"{name} ({memory / GIB:.0f} GiB)" for name, memory in torch["cuda"])
        yield DoctorFinding("GPU", "ok", names)
    else:
        yield DoctorFinding("GPU", "note", "none that torch can use", "not needed: engine and trainer run on the CPU")
    if fast or not torch["cuda"]:
        yield DoctorFinding("bfloat16 on the CPU", "ok", " and ".join(fast) or "emulated by other instructions")


def _kernels() -> Iterator[DoctorFinding]:
    from headrace.engine.native.kernels import binding
    from headrace.engine.native.kernels import binding as engine
    from headrace.native.build import LIMIT
    from headrace.trainer.kernels import binding as trainer

    tier = binding.tier()  # the same for both: one file of products serves them
    for who, found in (("engine", engine.built()), ("trainer", trainer.built())):
        if found.library is None:
            remedy = f"install a C++ compiler: without one the {who} is slower on a CPU"
            yield DoctorFinding(f"{who}'s kernels", "note", found.reason, remedy)
        elif tier is None:
            yield DoctorFinding(
                f"{who}'s kernels", "note", "this processor cannot execute them", f"name others in ${LIMIT}, or none"
            )
        else:
            yield DoctorFinding(f"{who}'s kernels", "ok", f"for {tier}, {found.reason}")


def _built_for(torch: dict[str, Any]) -> str:
    return "the CPU" if torch["built_for"] == "CPU" else f"CUDA {torch['built_for']}"


def _packages() -> list[DoctorFinding]:
    return [_in_range(name, _version(name)) for name in ("transformers", "pydantic", "msgspec")]


def _extras() -> Iterator[DoctorFinding]:
    for name, extra in EXTRAS.items():
        if is_installed(extra.module):
            yield DoctorFinding(
                f"[{name}]", "ok", f"{extra.module.replace('_', '-')} {_version(extra.module) or ''}".strip()
            )
        else:
            yield DoctorFinding(f"[{name}]", "note", "not installed", f"{extra.brings}: {install(name)}")


def engine_findings(interpreters: Sequence[str]) -> Iterator[DoctorFinding]:
    """The values of `engine.kind`, and the interpreters that have what each needs."""
    yield DoctorFinding("native", "ok", "headrace's own, in a process of the run")
    for kind, starts in startable_servers().items():
        found = [look(kind, python) for python in interpreters]
        there = [
            f"{package.version or 'unknown version'} in {package.python}" for package in found if not package.missing
        ]
        if there:
            yield DoctorFinding(
                kind, "ok", "; ".join(there), "" if not found[0].missing else "name it in engine.python"
            )
        else:
            lacking = "; ".join(f"no {', '.join(package.missing)} in {package.python}" for package in found)
            yield DoctorFinding(kind, "note", lacking, f"only for runs that start such a server: {starts.install}")


def taskset_findings(interpreters: Sequence[str]) -> Iterator[DoctorFinding]:
    """The interpreters that have verifiers."""
    found = [look_for_verifiers(python) for python in interpreters]
    there = [f"{package.version} in {package.python}" for package in found if not lacking(package)]
    if there:
        named = "" if not lacking(found[0]) else "name it in environment.python"
        yield DoctorFinding("verifiers", "ok", "; ".join(there), named)
    else:
        message = "; ".join(f"{lacking(package)} in {package.python}" for package in found)
        yield DoctorFinding(
            "verifiers", "note", message, f"only for tasksets (environment.kind = verifiers): {VERIFIERS}"
        )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _in_range(name: str, version: str | None, more: str = "") -> DoctorFinding:
    wanted = _requirement(name)
    if version is None:
        return DoctorFinding(name, "bad", "not installed", f"{pip_install()} '{name}{wanted}'")
    if not satisfies(version, wanted):
        return DoctorFinding(name, "bad", version + more, f"headrace needs {wanted}: {pip_install()} '{name}{wanted}'")
    return DoctorFinding(name, "ok", version + more)


def _requirement(name: str) -> str:
    """The version range that headrace's own metadata requires, such as `>=2.11,<2.14`."""
    try:
        required = importlib.metadata.requires("headrace") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return ""
    ours = [text for text in required if "extra ==" not in text and text.startswith(name)]
    bounds = [text[len(name) :].replace(" ", "") for text in ours if text[len(name) : len(name) + 1] in "<>=! "]
    return ",".join(sorted(bounds[0].split(","), reverse=True)) if bounds else ""


def satisfies(version: str, wanted: str) -> bool:
    given = _numbers(version)
    tests = {">=": lambda bound: given >= bound, "<": lambda bound: given < bound}
    return all(
        tests[sign](_numbers(part.removeprefix(sign)))
        for part in wanted.split(",")
        for sign in (">=", "<")
        if part.startswith(sign)
    )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(digits) for part in parts[:3] if (digits := "".join(c for c in part if c.isdigit())))


# --- machine ---------------------------------------------------------------------------------------------------------


def _machine() -> Iterator[DoctorFinding]:
    count = usable_cores()
    advice = "engine and trainer will take turns" if count < 2 else ""
    yield DoctorFinding("CPU cores", "note" if count < 2 else "ok", str(count), advice)
    present = memory()
    low = present < NEEDED_MEMORY
    yield DoctorFinding(
        "Memory", "note" if low else "ok", _gib(present), f"the demo wants about {_gib(NEEDED_MEMORY)}" if low else ""
    )


def _disks() -> Iterator[DoctorFinding]:
    for what, path in (("Disk for runs/", Path("runs")), ("Disk for models", _cache_dir())):
        free = shutil.disk_usage(_existing(path)).free
        low = free < NEEDED_DISK
        remedy = "a checkpoint of the demo takes 1.6 GiB, its model 0.3 GiB" if low else ""
        yield DoctorFinding(what, "note" if low else "ok", f"{_gib(free)} free at {path}", remedy)


def _existing(path: Path) -> Path:
    path = path.absolute()
    return path if path.exists() else _existing(path.parent)


def _cache_dir() -> Path:
    from headrace.models.resolve import cache_dir

    return cache_dir()


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


# --- sandbox ---------------------------------------------------------------------------------------------------------


def sandbox_findings() -> Iterator[DoctorFinding]:
    """The kinds of isolation of code that a model writes, each found out by trial."""
    from headrace.episodes.sandbox.isolation import examine_isolation
    from headrace.episodes.sandbox.sandbox import SandboxLost

    try:
        found = examine_isolation()
    except SandboxLost as error:
        yield DoctorFinding("all", "note", "no code can be run", str(error))
        return
    for isolation in found:
        remedy = (
            ""
            if isolation.there
            else f'refused for code that a model writes, unless sandbox.allow has "{isolation.kind}"'
        )
        yield DoctorFinding(isolation.kind, "ok" if isolation.there else "note", isolation.how, remedy)


# --- models and placement --------------------------------------------------------------------------------------------


def _models(full: bool) -> Iterator[DoctorFinding]:
    from headrace.models.resolve import model_states

    marks: dict[str, State] = {"ready": "ok", "absent": "note", "damaged": "bad"}
    for found in model_states(full):
        value = {"ready": f"cached, {_gib(_size(found.path))}", "absent": "not fetched yet"}.get(
            found.state, found.state
        )
        more = found.detail if found.state != "ready" else ""
        remedy = "; ".join(filter(None, [more, found.remedy]))
        yield DoctorFinding(found.model.name, marks[found.state], value, remedy)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _placement(torch: dict[str, Any] | str) -> Iterator[DoctorFinding]:
    """The meaning of `device`, `dtype` and `path` = "auto" on this machine."""
    if isinstance(torch, str):
        yield DoctorFinding("engine, trainer", "bad", "nothing can run without torch")
        return
    cuda = torch["cuda"]
    where = f"GPU 0 ({cuda[0][0]})" if cuda else f"CPU, {torch['threads']} threads"
    if cuda:
        chosen = {"engine": "bfloat16", "trainer": "bfloat16" if torch["bfloat16"] else "float32"}
    else:
        chosen = _chosen()
    yield DoctorFinding("engine", "ok", f"a process of its own: {where}, {chosen['engine']}")
    yield DoctorFinding("trainer", "ok", f"a process of its own: {where}, float32 weights, {chosen['trainer']}")
    yield DoctorFinding("rewards", "ok", "worker processes on the CPU")
    yield DoctorFinding("new weights", "ok", "shared memory, from trainer to engine")


def _chosen() -> dict[str, str]:
    """Returns the choices that a run of the demo's model would make by measurement, for engine and trainer."""
    from headrace.engine.config import EngineConfig
    from headrace.run.auto.candidates import candidates, choose, choose_threads
    from headrace.run.auto.measurer import ProbeMeasurer, thread_counts
    from headrace.trainer.config import TrainConfig

    engine, train, counts = EngineConfig(), TrainConfig(), thread_counts(usable_cores())
    figures = ProbeMeasurer().measure(known_config("smollm2-135m-instruct"), counts)
    allowed, threads = candidates(engine, train), choose_threads(counts, figures)
    return {
        "engine": choose("engine", engine, allowed, figures, threads).why,
        "trainer": choose("trainer", train, allowed, figures, threads).why,
    }


def known_config(name: str) -> dict[str, Any]:
    """The `config.json` of a known model, from the cache. If it is not there: the fields that the measurement needs."""
    from headrace.models.resolve import model_states

    for found in model_states(False):
        if found.model.name == name and found.state == "ready":
            return json.loads((found.path / "config.json").read_text(encoding="utf-8"))
    return SMOLLM2_135M


SMOLLM2_135M = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""The shape of that model (huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct)."""


# --- table -----------------------------------------------------------------------------------------------------------

_MARKS = {"ok": ("✓", "green"), "note": ("–", "yellow"), "bad": ("✗", "bold red")}


def print_findings(sections: dict[str, list[DoctorFinding]]) -> int:
    """Prints the findings and the verdict; returns the exit code."""
    from rich.table import Table

    from headrace.views.screen.console import Console
    from headrace.views.screen.console import PrintableText as Text

    console = Console()
    for title, findings in sections.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        for width in (1, 22, None):
            table.add_column(width=width)
        for found in findings:
            table.add_row(Text(*_MARKS[found.state]), found.what, found.value)
            if found.remedy:
                table.add_row("", "", Text(f"→ {found.remedy}", "red" if found.state == "bad" else "dim"))
        console.print(Text(title, "bold"), table, "", sep="\n")
    bad = [found.what for findings in sections.values() for found in findings if found.state == "bad"]
    if bad:
        console.print(Text("Cannot run yet: ", "bold red").append(", ".join(bad), "default not bold"))
    else:
        console.print(Text("Ready: ", "green").append("headrace train CONFIG.toml", "default"))
    return 1 if bad else 0
