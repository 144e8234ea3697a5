"""Does a run survive whatever is killed? One run in network namespaces with latency and loss, in which something dies again and again.

    sudo python benchmarks/kills.py --minutes 25 [--delay 0.005 --loss 0.005] [--seed 0] [--redis PATH]

Five namespaces: the controller's, with Redis and the head of a Ray cluster; two with a rollout host each; and two nodes of that cluster, on each of
which Ray places one of the trainer's two ranks. In random order are killed: an engine, a rank, the raylet of a rank's node, all processes of a host's
or of a rank's node, Redis, and the controller (which is resumed); and the link of any node is cut for 20 seconds. After each the script waits for two
further steps, and prints how long they took. In the end the run is interrupted, and its books are compared: every ticket has one outcome, and none was
trained twice. Needs root, ip, /dev/net/tun, redis-server and the extra `ray`.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from toy_models import make_model

from headrace.durable.journal import SteppedRecord, read_only
from headrace.facts.facts import RunEnded
from support.tiny_run import engines_of, of, tiny_config, trained_steps

HOSTS, RANKS = ("hr1", "hr2"), ("hr3", "hr4")
"""The namespaces of rollout hosts, and of Ray's nodes for ranks."""
NODES = {name: f"10.99.0.{number}" for number, name in enumerate(("hr0", *HOSTS, *RANKS), 1)}
"""All of them; the first is the controller's."""
PORT, RAY_PORT = 6379, 6380
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""Linux, if_tun.h."""
CUT = 20.0
"""Seconds without a link: longer than the 10 after which a host counts as lost."""
PATIENCE = 600.0
"""Seconds for two further steps."""
REWARD = """
import time

def letters(prompts, completions, **columns):
    time.sleep(0.2)  # so that the run leaves cores to others
    return [text.count("e") / max(len(text), 1) for text in completions]
"""


def sh(words: str) -> None:
    subprocess.run(words.split(), check=True)


class Network:
    """The machines' links, in a thread: every packet waits, and some are lost. (The kernel's `netem` does the same, where it is built in.)"""

    def __init__(self, delay: float, loss: float) -> None:
        """`delay`: seconds of a way in the mean, which differ by a fifth. `loss`: share of packets."""
        self._delay, self._loss, self.cut = delay, loss, set[str]()
        self._ends = {name: self._join(name, address) for name, address in NODES.items()}
        self._names = {socket.inet_aton(address): name for name, address in NODES.items()}
        self.carried = 0
        """Packets."""
        threading.Thread(target=self._carry, daemon=True).start()

    def _join(self, name: str, address: str) -> int:
        """Makes a namespace with one interface, whose packets are read from the file that is returned."""
        sh(f"ip netns add {name}")
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", f"e{name}".encode(), IFF_TUN | IFF_NO_PI))
        sh(f"ip link set e{name} netns {name}")
        sh(f"ip -n {name} address add {address}/24 dev e{name}")
        for link in ("lo", f"e{name}"):
            sh(f"ip -n {name} link set {link} up")
        return end

    def _carry(self) -> None:
        sources = {end: name for name, end in self._ends.items()}
        waiting: list[tuple[float, int, str, bytes]] = []
        while True:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, name, packet = heapq.heappop(waiting)
                if name not in self.cut:
                    with suppress(OSError):
                        os.write(self._ends[name], packet)
            until = min(0.1, waiting[0][0] - now) if waiting else 0.1
            for end in select.select(list(sources), [], [], max(0.0, until))[0]:
                with suppress(OSError):
                    while packet := os.read(end, 1 << 16):
                        name = self._names.get(packet[16:20])
                        if name and sources[end] not in self.cut and random.random() >= self._loss:
                            self.carried += 1
                            due = time.monotonic() + self._delay * random.uniform(0.8, 1.2)
                            heapq.heappush(waiting, (due, self.carried, name, packet))

    def close(self) -> None:
        for name in NODES:
            kill_in(name)
            sh(f"ip netns del {name}")


def kill_in(node: str, words: bytes = b"") -> None:
    """Kills the processes of a node that have these words in their command line."""
    pids = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True, check=False).stdout.split()
    for pid in map(int, pids):
        with suppress(ProcessLookupError, FileNotFoundError):
            if words in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "):
                os.kill(pid, signal.SIGKILL)


class Run:
    def __init__(self, place: Path, model: Path, redis: str, network: Network) -> None:
        self.place, self.network, self._redis = place, network, redis
        self._bus = f"redis://{NODES['hr0']}:{PORT}"
        (place / "letters.py").write_text(REWARD)
        self._config = tiny_config(
            place,
            model,
            name="killed",
            reward={"function": f"{place / 'letters.py'}:letters"},
            train={
                "steps": 1_000_000,
                "parallel": {"shard": 2},
                "max_deaths": 1000,
                "learning_rate": 1e-8,
                "threads": 1,
            },
            checkpoint={"every": 5},
            orchestration={
                "bus": self._bus,
                "kind": "ray",
                "address": f"{NODES['hr0']}:{RAY_PORT}",
                "listen": f"{NODES['hr0']}:0",
                "trainer": "elsewhere",
            },
        )
        self.directory = place / "runs" / "killed"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, what: str) -> None:
        node, words = "hr0", [sys.executable, "-m", "headrace"]
        if what == "redis":
            words = [self._redis, "--bind", NODES["hr0"], "--port", str(PORT), "--dir", str(self.place), "--save", ""]
            words += ["--appendonly", "yes", "--protected-mode", "no"]
        elif what == "ray":
            words = self._ray(node, "--head", f"--port={RAY_PORT}", "--num-cpus=0", "--include-dashboard=false")
        elif what in RANKS:
            node, words = what, self._ray(what, f"--address={NODES['hr0']}:{RAY_PORT}", "--num-cpus=1")
        elif what in HOSTS:
            node = what
            words += ["rollouts", "--bus", self._bus, "--set", "engine.threads=1"]
        elif self.directory.exists():
            words += ["train", "--resume", str(self.directory)]
        else:
            words = [sys.executable, "-c", "import json, sys, headrace; headrace.train(json.loads(sys.argv[1]))"]
            words += [json.dumps(self._config)]
        with (self.place / f"{what}.log").open("ab") as log:
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = ["ip", "netns", "exec", node, *words]  # replaces itself by the command
            self.processes[what] = subprocess.Popen(command, stdout=log, stderr=log, env=variables)

    def _ray(self, node: str, *options: str) -> list[str]:
        command = str(Path(sys.executable).with_name("ray"))
        small = ["--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        return [command, "start", f"--node-ip-address={NODES[node]}", *options, *small]

    def revive(self) -> None:
        """Starts Ray again on nodes where it has ended, as a system's services would: it ends where its head has missed it for some 15 seconds,
        or took too long to start."""
        for node in RANKS:
            if self.processes[node].poll() is not None:
                self.start(node)
                time.sleep(2.0)

    def kill(self, what: str) -> None:
        self.processes[what].kill()
        self.processes[what].wait()


def act_on(run: Run, what: str, chance: random.Random) -> None:
    host, node = chance.choice(HOSTS), chance.choice(RANKS)
    if what == "engine":
        for pid in engines_of(run.processes[host].pid):
            os.kill(pid, signal.SIGKILL)
    elif what == "rank":
        kill_in(node, b"headrace.run.worker.worker")
    elif what == "raylet":
        kill_in(node, b"raylet/raylet")  # `revive` starts another
    elif what in ("a host's node", "a rank's node"):
        lost = host if what == "a host's node" else node
        kill_in(lost)
        time.sleep(CUT)
        run.start(lost)
    elif what == "redis":
        run.kill("redis")
        time.sleep(3.0)
        run.start("redis")
    elif what == "controller":
        run.kill("controller")
        run.start("controller")
    else:
        run.network.cut.add(host if what == "a host's link" else node)
        time.sleep(CUT)
        run.network.cut.clear()


def wait_for(true: Callable[[], bool]) -> float:
    """Returns the seconds that it took. Raises TimeoutError."""
    begun = time.monotonic()
    while not true():
        if time.monotonic() - begun > PATIENCE:
            raise TimeoutError
        time.sleep(0.2)
    return time.monotonic() - begun


def survive(run: Run, minutes: float, chance: random.Random) -> dict[str, list[float]]:
    """Returns the seconds until two further steps, by what was killed."""
    kinds = [
        "engine",
        "rank",
        "raylet",
        "a host's node",
        "a rank's node",
        "redis",
        "controller",
        "a host's link",
        "a rank's link",
    ]
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    left: list[str] = []
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        left = left or chance.sample(kinds, len(kinds))
        what = left.pop()
        act_on(run, what, chance)
        steps = trained_steps(run.directory)
        took[what].append(wait_for(lambda steps=steps: run.revive() or trained_steps(run.directory) >= steps + 2))  # type: ignore[misc]
        print(f"{time.strftime('%H:%M:%S')} {what}: {took[what][-1]:.1f} s, step {steps + 2}", flush=True)
        for host in HOSTS:
            if run.processes[host].poll() is not None:
                print(
                    f"  {host} has ended with {run.processes[host].returncode}, and is started again",
                    flush=True,
                )
                run.start(host)
        if run.processes["controller"].poll() is not None:
            raise RuntimeError(f"the controller has ended: {(run.place / 'controller.log').read_text()[-2000:]}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--delay", type=float, default=0.005, help="seconds of a way")
    parser.add_argument("--loss", type=float, default=0.005, help="share of packets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--redis", default=shutil.which("redis-server") or "redis-server")
    parser.add_argument("--keep", type=Path, help="a new directory for the run, which is kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        network = Network(given.delay, given.loss)
        stack.callback(network.close)
        place = given.keep or Path(temporary) / "run"
        place.mkdir()
        run = Run(place, make_model(place / "model", "llama"), given.redis, network)
        for what in ("redis", "ray", *RANKS):
            run.start(what)
        wait_for(
            lambda: run.revive() or all(b"runtime started" in (place / f"{name}.log").read_bytes() for name in RANKS)
        )
        for what in ("controller", *HOSTS):
            run.start(what)
        wait_for(lambda: trained_steps(run.directory) >= 3)
        took = survive(run, given.minutes, random.Random(given.seed))
        run.processes["controller"].send_signal(signal.SIGTERM)
        run.processes["controller"].wait(PATIENCE)
        ended = of(run.directory, RunEnded)[-1]
        tickets = [ticket for step in read_only(run.directory, SteppedRecord) for ticket in step.tickets]
    print("\n| killed | times | seconds until two further steps, median | worst |\n|---|---|---|---|")
    for what, seconds in took.items():
        if seconds:
            print(f"| {what} | {len(seconds)} | {statistics.median(seconds):.0f} | {max(seconds):.0f} |")
    print(f"\n{ended.reason} at step {ended.step}; tickets without an outcome: {ended.accounting.balance()}")
    print(f"{network.carried} packets; trained {len(tickets)} groups, {len(tickets) - len(set(tickets))} of them twice")


if __name__ == "__main__":
    main()
