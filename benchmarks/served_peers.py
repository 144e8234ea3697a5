"""`headrace serve` beside `vllm serve`, under vLLM's own client: throughput, and time to the first token.

    python benchmarks/served_peers.py [--model smollm2-135m-instruct] [--rounds 3] [--dtype bfloat16] [--json figures.json]

`make bench-setup` installs vLLM for CPUs in `.venv-bench`. Both servers are alive throughout on the same cores, with the same dtype, context and
number of sequences; the one that is not asked is stopped (SIGSTOP), and rounds are interleaved after one that warms up. The client is
`vllm bench serve` over `/v1/completions`: random prompts of 128 tokens, 64 sampled tokens each, without an end-of-sequence token.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from headrace.models.resolve import resolve_model

PEERS = Path(".venv-bench/bin")
CLIENT = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`. The command-line program asks for a distribution named vllm, which the build for CPUs is not."""
CONTEXT, SEQUENCES = 1024, 64
STARTING = 900.0
LOADS = {"one after the other": (16, 1), "16 at once": (64, 16), "64 at once": (192, 64)}
"""By name: requests, and how many are under way at once."""
FIGURES = {"output_throughput": "tokens/s", "median_ttft_ms": "first token, ms", "median_tpot_ms": "per token, ms"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def commands(model: Path, dtype: str, ports: dict[str, int]) -> dict[str, list[str]]:
    sets = {"engine.dtype": json.dumps(dtype), "engine.context_length": CONTEXT, "engine.max_running": SEQUENCES}
    ours = [sys.executable, "-m", "headrace", "serve", str(model), "--port", str(ports["headrace"])]
    ours += [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    theirs = [str(PEERS / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    theirs += ["--host", "127.0.0.1", "--port", str(ports["vllm"]), "--dtype", dtype]
    theirs += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(SEQUENCES), "--kv-cache-memory-bytes", str(2**30)]
    return {"headrace": ours, "vllm": theirs}


def until_up(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTING
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"a server ended with exit code {process.returncode}; its log is in the directory above")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit("a server did not come up")


@contextlib.contextmanager
def running(all_commands: dict[str, list[str]], ports: dict[str, int], logs: Path) -> Iterator[dict[str, int]]:
    """Yields the process groups of both servers, each of which is up and stopped."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in all_commands.items():
            with (logs / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            until_up(ports[name], processes[name])
            os.killpg(processes[name].pid, signal.SIGSTOP)
        yield {name: process.pid for name, process in processes.items()}
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def measured(model: Path, port: int, load: str, seed: int, scratch: Path) -> dict[str, float]:
    """Runs vLLM's client once. Raises SystemExit if a request fails or has another number of tokens."""
    requests, at_once = LOADS[load]
    result = scratch / "result.json"
    command = [str(PEERS / "python"), "-c", CLIENT, "--backend", "openai"]
    command += ["--model", str(model), "--served-model-name", served(port), "--base-url", f"http://127.0.0.1:{port}"]
    command += ["--endpoint", "/v1/completions", "--dataset-name", "random", "--ignore-eos", "--seed", str(seed)]
    command += ["--random-input-len", "128", "--random-output-len", "64", "--num-prompts", str(requests)]
    command += ["--max-concurrency", str(at_once), "--save-result", "--result-dir", str(scratch)]
    command += ["--result-filename", result.name, "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = json.loads(result.read_text())
    if found["completed"] != requests or found["total_output_tokens"] != 64 * requests:
        raise SystemExit(f"{found['completed']} of {requests} requests, {found['total_output_tokens']} tokens")
    return {name: float(found[name]) for name in FIGURES}


def served(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as answer:
        return str(json.load(answer)["data"][0]["id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the servers end too
    model, ports = resolve_model(given.model), {"headrace": free_port(), "vllm": free_port()}
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        print(f"logs: {scratch}; {platform.processor() or platform.machine()}, {os.cpu_count()} cores", flush=True)
        with running(commands(model, given.dtype, ports), ports, scratch) as groups:
            for number in range(given.rounds + 1):  # the first warms up
                for load in LOADS:
                    for name, group in groups.items():
                        os.killpg(group, signal.SIGCONT)
                        figures = measured(model, ports[name], load, number, scratch)
                        os.killpg(group, signal.SIGSTOP)
                        rounds.append({"round": number, "load": load, "server": name, **figures})
                        print(rounds[-1], flush=True)
    report([one for one in rounds if one["round"]])
    if given.json:
        given.json.write_text(json.dumps(rounds, indent=1))


def report(rounds: list[dict[str, Any]]) -> None:
    """Prints medians over rounds, and the median ratio within a round."""
    print("\n| load | figure | headrace serve | vllm serve | ratio |\n|---|---|---|---|---|")
    for load in LOADS:
        for figure, title in FIGURES.items():
            pairs = zip(
                [one[figure] for one in rounds if (one["load"], one["server"]) == (load, "headrace")],
                [one[figure] for one in rounds if (one["load"], one["server"]) == (load, "vllm")],
                strict=True,
            )
            ours, theirs = zip(*pairs, strict=True)
            ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
            print(f"| {load} | {title} | {median(ours):,.1f} | {median(theirs):,.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
