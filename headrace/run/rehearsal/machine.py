"""The cores, memory and GPUs of this machine, within the limits of a container. Torch is asked in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headrace.core.errors import ConfigError
from headrace.native.resources import available, memory, usable_cores

# Importing torch takes seconds, and a broken build must not take the caller with it.
TORCH_PROBE = """
import json, torch
cuda = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
has = lambda name: bool(getattr(torch.cpu, name, bool)())
print(json.dumps({
    "version": torch.__version__, "threads": torch.get_num_threads(),
    "avx512_bf16": has("_is_avx512_bf16_supported"), "amx": has("_is_amx_tile_supported"),
    "bfloat16": bool(cuda) or torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    "built_for": torch.version.cuda or "CPU", "cuda": [[d.name, d.total_memory] for d in cuda],
    "free": torch.cuda.mem_get_info(0)[0] if cuda else 0,
}))
"""


def ask_torch() -> subprocess.Popen[str]:
    """Starts the probe and returns at once, so that other checks run meanwhile; `torch_facts` reads the answer."""
    command = [sys.executable, "-c", TORCH_PROBE]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def torch_facts(probe: subprocess.Popen[str]) -> dict[str, Any] | str:
    """Returns the output of `TORCH_PROBE`, or the reason why torch failed."""
    try:
        out, err = probe.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        probe.kill()
        return "importing it took more than two minutes"
    if probe.returncode:
        return (err.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
    return json.loads(out.splitlines()[-1])


class Machine(NamedTuple):
    cores: int
    memory: int
    """Bytes, within a container's limit."""
    available: int
    """Bytes that are free now."""
    gpu: tuple[str, int] | None
    """Name and bytes of the GPU that a run uses; None if there is none."""
    torch: dict[str, Any] | None
    """The output of `TORCH_PROBE`. None if torch was not asked: without a GPU only its speed is unknown."""

    @property
    def gpu_free(self) -> int:
        """Bytes of the GPU that are free now; 0 without one."""
        free = (self.torch or {}).get("free", 0)
        return min(free or self.gpu[1], self.gpu[1]) if self.gpu else 0

    def device(self, setting: str, wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
        """Returns the device that a part runs on. `setting`: its name in the config.

        Raises ConfigError if `wanted` is a GPU and there is none."""
        if wanted == "cuda" and self.gpu is None:
            built = self.torch["built_for"] if self.torch else ""
            why = "this build of torch is for the CPU" if built == "CPU" else "torch finds no GPU here"
            raise ConfigError(
                f'{setting} = "cuda", but {why}; set it to "auto" or "cpu" (headrace doctor lists the devices)'
            )
        return "cuda" if self.gpu and wanted != "cpu" else "cpu"

    def dtype(self, wanted: str, device: str) -> str:
        """Returns the dtype that the trainer computes in, estimated if torch was not asked."""
        if wanted != "auto":
            return wanted
        if self.torch is None:
            return "bfloat16" if device == "cuda" or _has_avx512() else "float32"
        return "bfloat16" if self.torch["bfloat16"] else "float32"


def inspect_machine(probe: subprocess.Popen[str] | None) -> Machine:
    """Returns the facts of this machine. Raises ConfigError if torch cannot be imported."""
    facts = torch_facts(probe) if probe else None
    if isinstance(facts, str):
        raise ConfigError(f"torch cannot be used here: {facts} (headrace doctor shows what is missing)")
    cuda = facts["cuda"] if facts else []
    gpu = (str(cuda[0][0]), int(cuda[0][1])) if cuda else None
    return Machine(usable_cores(), memory(), available(), gpu, facts)


def may_have_gpu() -> bool:
    """Returns whether the operating system has a GPU driver (NVIDIA, WSL, AMD). Without one, torch need not be asked."""
    drivers = ("/proc/driver/nvidia/gpus", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
    return any(Path(driver).exists() for driver in drivers)


def _has_avx512() -> bool:
    """Returns whether the CPU has the instructions that oneDNN requires before torch computes in bfloat16."""
    flags = next((line for line in _cpuinfo().splitlines() if line.startswith("flags")), "").split()
    return {"avx512bw", "avx512vl", "avx512dq"} <= set(flags)


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


# --- Checks that a run can write its directory. Leaves nothing behind.


def place_problem(run_dir: Path, out: str) -> str:
    """Returns an empty string, or why the directory of the run cannot be created or written."""
    above = run_dir.absolute()
    while not above.exists() and not above.is_symlink():
        above = above.parent
    if not above.is_dir():
        what = "is a broken link" if above.is_symlink() else "is a file"
        return f"the run cannot be written to {run_dir}: {above} {what}; set out (now {out}) or name to another place"
    try:
        with tempfile.TemporaryFile(dir=above):
            return ""
    except OSError as error:
        message = error.strerror or type(error).__name__
        return f"the run cannot be written to {run_dir}: {above} is not writable ({message}); set out (now {out}) to a directory that you may write to"
