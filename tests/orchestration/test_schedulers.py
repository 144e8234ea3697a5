"""The scripts for Slurm and Kubernetes: the first with commands that stand for Slurm's, on this machine; the second as far as it can be read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli import front_parser
from headrace.facts.facts import WorkerJoined
from headrace.run.config import RunConfig
from headrace.settings.toml import build, dump_changed
from support.runs.beside import PATIENCE, until
from support.runs.offered_workers import free_port
from support.tiny_run import of, tiny_config, trained_steps

CONTAINERS = Path(__file__).parents[2] / "containers"
SCRIPT = CONTAINERS / "slurm.sbatch"

SRUN = """\
#!{python}
# Starts the tasks here, each with its number on its node, and ends them when it is ended.
import os, signal, subprocess, sys
words = sys.argv[1:]
given = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word and words.index(word) < words.index("headrace"))
assert given["exclude"] == "127.0.0.1", given
command = words[words.index("headrace"):]
tasks = [
    subprocess.Popen(command, env=os.environ | {{"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n % int(given["ntasks-per-node"]))}})
    for n in range(int(given["ntasks"]))
]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """\
#!/bin/bash
case "$1" in
show) printf '127.0.0.1\\nnode-b\\nnode-c\\n' ;;
requeue) echo "$2" >> {queue} ;;
esac
"""


def fake_slurm(directory: Path) -> dict[str, str]:
    """Returns the environment of a job of three nodes with one engine on each but the first."""
    programs = directory / "bin"
    programs.mkdir()
    for name, text in (
        ("srun", SRUN.format(python=sys.executable)),
        ("scontrol", SCONTROL.format(queue=directory / "queue")),
        ("headrace", f'#!/bin/bash\nexec {sys.executable} -m headrace "$@"\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node-[a-c]",
        "SLURM_NTASKS_PER_NODE": "1",
        "HEADRACE_OUT": str(directory / "runs"),
        "HEADRACE_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }


def written(path: Path, model: Path, **tables: Any) -> None:
    """Writes the config of a tiny run, as a person would: without name and place."""
    tree = tiny_config(path.parent, model, engine={"threads": 1}, **tables)
    path.write_text(dump_changed(build(RunConfig, {key: tree[key] for key in tree if key not in ("name", "out")})))


@pytest.mark.slow
def test_a_job_that_is_preempted_is_queued_again_and_its_run_goes_on(tiny_llama: Path, tmp_path: Path) -> None:
    written(tmp_path / "tiny.toml", tiny_llama, train={"steps": 400})
    run, job = tmp_path / "runs" / "tiny", fake_slurm(tmp_path)
    first = subprocess.Popen(["bash", str(SCRIPT), "tiny.toml"], cwd=tmp_path, env=job, start_new_session=True)
    try:
        until(lambda: trained_steps(run) >= 2)
        assert {fact.who for fact in of(run, WorkerJoined)} == {"engine 1", "engine 2"}
        first.send_signal(signal.SIGTERM)  # to the script alone, as Slurm does
        assert first.wait(PATIENCE) == 143
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
    assert (tmp_path / "queue").read_text() == "4711\n" and not list((tmp_path / "runs").glob(".token-*"))
    done = trained_steps(run)
    (tmp_path / "tiny.toml").unlink()  # the run has its own
    script = tmp_path / "short.sbatch"
    script.write_text(SCRIPT.read_text().replace("settings=(", f"settings=(--set train.steps={done + 2} "))
    again = subprocess.run(["bash", str(script), "tiny.toml"], cwd=tmp_path, env=job, timeout=PATIENCE)
    assert again.returncode == 0 and trained_steps(run) >= done + 2
    assert (tmp_path / "queue").read_text() == "4711\n", "a run that is done is not queued again"


def test_one_node_needs_no_script(tmp_path: Path) -> None:
    job = fake_slurm(tmp_path)
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/bash\necho 127.0.0.1\n")
    done = subprocess.run(["bash", str(SCRIPT), "a.toml"], cwd=tmp_path, env=job, capture_output=True, text=True)
    assert done.returncode == 2 and "start headrace train itself" in done.stderr


# -- Kubernetes -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return {part["kind"]: part for part in yaml.safe_load_all((CONTAINERS / "kubernetes.yaml").read_text())}


def container(part: dict[str, Any]) -> dict[str, Any]:
    (found,) = part["spec"]["template"]["spec"]["containers"]
    return found


def test_names_ports_and_volumes_of_the_manifest_fit(parts: dict[str, Any]) -> None:
    service, job, engines = parts["Service"], parts["Job"], parts["Deployment"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert engines["spec"]["selector"]["matchLabels"] == engines["spec"]["template"]["metadata"]["labels"]
    (port,) = service["spec"]["ports"]
    assert f"{service['metadata']['name']}:{port['port']}" in container(engines)["command"]
    assert f"$POD_IP:{port['port']}" in container(job)["args"][0]
    for part in (job, engines):
        spec = part["spec"]["template"]["spec"]
        mounted = {mount["name"] for mount in container(part)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        (secret,) = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        assert secret["defaultMode"] == 0o400, "a token that others can read is refused"
    wanted = {part["name"]: part.get("value") for part in container(job)["env"]}
    assert int(wanted["ENGINES"]) == engines["spec"]["replicas"]
    grace = job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert "orchestration.grace=100" in container(job)["args"][0] and grace > 100


def test_its_worker_is_a_command_of_this_version(parts: dict[str, Any]) -> None:
    program, *words = container(parts["Deployment"])["command"]
    assert program == "headrace" and front_parser().parse_args(words).offers == "engine"


@pytest.mark.slow
def test_its_run_starts_and_a_second_pod_resumes_it(parts: dict[str, Any], tiny_llama: Path, tmp_path: Path) -> None:
    """The text of the container's shell, with directories of this test in place of those of the volumes."""
    for name in ("config", "runs", "token"):
        (tmp_path / name).mkdir()
    written(tmp_path / "config" / "run.toml", tiny_llama)
    (tmp_path / "token" / "token").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "token" / "token").chmod(0o400)
    port, text = free_port(), container(parts["Job"])["args"][0]
    text = re.sub(r"(?<=[ =])/(?=config|runs|token)", f"{tmp_path}/", text).replace("7400", str(port))
    job = fake_slurm(tmp_path) | {"POD_IP": "127.0.0.1", "ENGINES": "1"}
    words = container(parts["Deployment"])["command"]
    worker = [
        word.replace("/token/token", f"{tmp_path}/token/token").replace("headrace-run:7400", f"127.0.0.1:{port}")
        for word in words
    ]
    engine = subprocess.Popen(worker, env=job, start_new_session=True)
    try:
        assert subprocess.run(["bash", "-c", text], env=job, timeout=PATIENCE).returncode == 0
        run = tmp_path / "runs" / "run"
        assert trained_steps(run) == 6
        longer = text.replace("settings=(", "settings=(--set train.steps=8 ")
        assert subprocess.run(["bash", "-c", longer], env=job, timeout=PATIENCE).returncode == 0
        assert trained_steps(run) == 8
    finally:
        os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()
