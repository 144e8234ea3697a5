"""The fake servers of vLLM and SGLang over the real engine, each in a process of its own.

    python fake_servers.py vllm serve MODEL --port 8000 --dtype float32 ... [--fault NAME]
    python fake_servers.py sglang MODEL PORT [FAULT ...]

vLLM's reads the command line of `vllm serve`, as far as headrace uses it; `interpreter` makes a Python that has it installed as vLLM, and SGLang's, which then
reads that of `sglang.launch_server`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

import headrace
from headrace.engine.config import EngineConfig
from headrace.serve.config import ServeConfig
from headrace.serve.start import opened
from headrace.testing.servers.fake_sglang import FakeSglang
from headrace.testing.servers.fake_vllm import FAULTS, FakeVllm, VllmGenerate
from headrace.web.server import bind, make_server


def log_of_vllm(name: str) -> str:
    """What the real one wrote (`vllm_logs/README.md`)."""
    return (Path(__file__).parent / "vllm_logs" / f"{name}.txt").read_text()


class WithoutKernel(FakeVllm):
    """Ends at its first request, as vLLM does where it has no kernel for the model."""

    def _check(self, body: VllmGenerate) -> None:
        print(log_of_vllm("no_kernel"), file=sys.stderr, flush=True)
        os._exit(0)


OWN_FAULTS = ("no_checker", "no_kernel")


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=10_000_000)
    parser.add_argument("--max-loras", type=int, default=0)
    parser.add_argument("--max-lora-rank", type=int)
    parser.add_argument("--lora-target-modules", nargs="+")
    parser.add_argument("--shutdown-timeout", type=int, default=0)
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    for switch in ("--enable-scale-out", "--enable-lora", "--enable-sleep-mode", "--disable-uvicorn-access-log"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--fault", action="append", default=[], choices=[*FAULTS, *OWN_FAULTS])
    parser.add_argument("--weight-transfer-config")
    parser.add_argument("--gpu-memory-utilization", type=float)
    return parser.parse_args(words)


async def vllm(words: list[str]) -> None:
    given = arguments(words)
    sock = bind(given.host, given.port)
    loras = given.max_loras if given.enable_lora else 0
    engine = EngineConfig(
        kv_gib=given.kv_cache_memory_bytes / 2**30,
        context_length=given.max_model_len,
        max_running=given.max_num_seqs,
        dtype=given.dtype,
        max_adapters=loras,
    )
    has = {
        "dev": os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        "lora": os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "True",
        "scale_out": given.enable_scale_out,
        "checker": "no_checker" not in given.fault,
        "transfer": given.weight_transfer_config == '{"backend": "headrace"}',
    }
    with tempfile.TemporaryDirectory() as logs:
        async with opened(ServeConfig(model=given.model, engine=engine), Path(given.model), Path(logs)) as serving:
            server = (WithoutKernel if "no_kernel" in given.fault else FakeVllm)(
                serving,
                weights=Path(given.model),
                dtype=given.dtype,
                max_loras=loras,
                logprobs_mode=given.logprobs_mode,
                sleep_mode=given.enable_sleep_mode,
                faults=set(given.fault) - set(OWN_FAULTS),
                absent=[name for name, there in has.items() if not there],
            )
            await make_server(server.app(os.environ.get("VLLM_API_KEY", ""))).serve(sockets=[sock])


async def sglang(words: list[str]) -> None:
    model, port, *faults = words
    sock = bind("127.0.0.1", int(port))
    engine = EngineConfig(kv_gib=0.01, context_length=64, dtype="float32", max_adapters=2)
    with tempfile.TemporaryDirectory() as logs:
        async with opened(ServeConfig(model=model, engine=engine), Path(model), Path(logs)) as serving:
            server = FakeSglang(serving, faults=faults, enable_lora=True, max_loras_per_batch=2, enable_metrics=True)
            await make_server(server.app()).serve(sockets=[sock])


def read_key(config: str) -> str:
    """`config`: the file of settings, which holds the key alone."""
    assert config.endswith(".yaml"), "SGLang reads no other file"
    name, _, key = Path(config).read_text().strip().partition(": ")
    assert name == "api-key" and len(key) >= 16
    return key


async def launch_sglang(words: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model-path", "--host", "--config", "--dtype"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--context-length"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--max-running-requests", "--max-loras-per-batch", "--max-loaded-loras", "--max-lora-rank"):
        parser.add_argument(name, type=int, default=0)
    for name in ("--incremental-streaming-output", "--enable-metrics", "--enable-lora"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--lora-target-modules", choices=["all"])
    parser.add_argument("--fault", action="append", default=[])
    given = parser.parse_args(words)
    key = read_key(given.config)
    loras = given.max_loaded_loras if given.enable_lora else 0
    engine = EngineConfig(
        kv_gib=0.01, context_length=given.context_length - 6, dtype=given.dtype, max_adapters=loras, threads=1
    )
    reported = {
        "dtype": given.dtype,
        "incremental_streaming_output": given.incremental_streaming_output,
        "enable_metrics": given.enable_metrics,
        "enable_lora": given.enable_lora,
        "max_loras_per_batch": given.max_loras_per_batch,
        "max_loaded_loras": loras or None,
    }
    with tempfile.TemporaryDirectory() as logs:
        config = ServeConfig(model=given.model_path, engine=engine)
        async with opened(config, Path(given.model_path), Path(logs)) as serving:
            server = FakeSglang(serving, faults=given.fault, **reported)
            await make_server(server.app(key)).serve(sockets=[bind(given.host, given.port)])


PIP = """
import pathlib, shutil, sys, tomllib
project = tomllib.loads((pathlib.Path(sys.argv[2]) / "pyproject.toml").read_text())["project"]
site = pathlib.Path(__file__).parent
for before in site.glob("headrace-*.dist-info"):
    shutil.rmtree(before)
place = site / "headrace-VERSION.dist-info"
place.mkdir()
(place / "METADATA").write_text("Metadata-Version: 2.1\\nName: headrace\\nVersion: VERSION\\n")
points = [(group, name, at) for group, names in project["entry-points"].items() for name, at in names.items()]
(place / "entry_points.txt").write_text("".join(f"[{group}]\\n{name} = {at}\\n" for group, name, at in points))
"""
"""A pip that fetches nothing: `pip install DIRECTORY` notes a version and the entry points of the project there, whose modules can be
imported anyhow."""


def interpreter(directory: Path, installs: str = headrace.__version__) -> Path:
    """A Python in which this is installed as vLLM 0.32, and headrace can be installed, as the version `installs`."""
    site = directory / "site"
    package = site / "vllm/entrypoints/cli"
    package.mkdir(parents=True)
    for one in (package, package.parent, package.parent.parent):
        (one / "__init__.py").touch()
    (package / "main.py").write_text(
        "import asyncio, sys\nfrom support import fake_servers\nasyncio.run(fake_servers.vllm(sys.argv[1:]))\n"
    )
    (other := site / "sglang").mkdir()
    (other / "__init__.py").touch()
    (other / "launch_server.py").write_text(
        "import asyncio, sys\nfrom support import fake_servers\nasyncio.run(fake_servers.launch_sglang(sys.argv[1:]))\n"
    )
    for name, version in (("vllm", "0.32.0"), ("sglang", "0.5.19")):
        metadata = site / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    # The environment behind it has headrace's entry points; the first of two distributions of one name is the one that counts.
    none = site / "headrace-0.dist-info"
    none.mkdir()
    (none / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace\nVersion: 0\n")
    (site / "pip.py").write_text(PIP.replace("VERSION", installs))
    path = ":".join(map(str, (site, Path(__file__).parents[1], Path(headrace.__file__).parent.parent)))
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


if __name__ == "__main__":
    asyncio.run({"vllm": vllm, "sglang": sglang}[sys.argv[1]](sys.argv[2:]))
