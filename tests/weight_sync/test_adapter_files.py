"""Adapters as files that vLLM loads, beside those of earlier versions."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.weight_sync.in_vllm.adapter_files import write_adapter
from headrace.weight_sync.packed import lay_out


def test_a_new_adapter_stays_although_the_clock_was_set_back(tmp_path: Path) -> None:
    """The files of before then have later times, and it would be removed as the oldest one."""
    tensors = {"layers.0.q.lora_A": torch.zeros(2, 4), "layers.0.q.lora_B": torch.zeros(4, 2)}
    manifest, adapter = lay_out(tensors.items(), torch.float32), AdapterSpec("policy", 2, 4.0)
    for version in range(4):
        update = WeightUpdate(version=version, kind="adapter", fingerprint="", nbytes=64, seconds=0.0, adapter=adapter)
        target = tmp_path / f"policy-v{version}"
        write_adapter(target, update, manifest, tensors)
        assert (target / "adapter_model.safetensors").is_file()
        assert len(list(tmp_path.iterdir())) == min(version + 1, 2)
        if version == 1:
            for other in tmp_path.iterdir():
                os.utime(other, (4e9, 4e9))
