"""Workers get as many threads as there are cores for them, and threads that sleep while they wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from headrace.native.resources import usable_cores
from headrace.processes.launch.local import environment

CODE = (
    "import json, os, sys\n"
    "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    "from headrace.native.arithmetic import machine_mark\n"
    "from headrace.processes.launch.local import environment\n"
    "print(json.dumps([environment(()), machine_mark(())]))\n"
)


def test_named_cores_get_a_thread_each():
    found = environment((0, 2, 5))
    assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "3" and found["HEADRACE_CORES"] == "0,2,5"
    assert (found["OMP_WAIT_POLICY"], found["GOMP_SPINCOUNT"]) == ("PASSIVE", "0")
    assert environment(())["OMP_NUM_THREADS"] == str(usable_cores())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_process_that_may_use_one_core_starts_workers_of_one_thread():
    """The machine may have more: threads beyond what we may use only wait for each other."""
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    variables, mark = json.loads(found.stdout)
    assert variables["OMP_NUM_THREADS"] == mark["threads"] == "1" and variables["HEADRACE_CORES"] == ""
