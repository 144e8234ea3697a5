#!/usr/bin/env bash
# Builds, checks and times headrace on a machine with a GPU, in one call of a few minutes. Needs Python 3.11+ with a CUDA build of
# torch; what else is missing is installed beside it where a package index can be reached, and named where it cannot.
#   bash benchmarks/device.sh [cuda|cpu]        (cpu with tiny shapes: checks the script itself)
set -euo pipefail
cd "$(dirname "$0")/.."
device="${1:-cuda}"
python="${PYTHON:-python3}"
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"

if ! "$python" -c "import torch, transformers, msgspec, pydantic, xxhash, safetensors, rich" 2>/dev/null; then
    "$python" -m venv --system-site-packages .venv-device
    python=.venv-device/bin/python
    "$python" -m pip install --quiet -e ".[dev]"
fi

"$python" benchmarks/device.py --device "$device"
"$python" benchmarks/device_ipc.py --device "$device"
