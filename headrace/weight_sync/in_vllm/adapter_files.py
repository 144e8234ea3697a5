"""An adapter that was received, as files that vLLM loads by their path."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.weights import Manifest, WeightUpdate
from headrace.weight_sync.files import KEPT, peft_config

if TYPE_CHECKING:
    import torch


def write_adapter(target: Path, update: WeightUpdate, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes the directory as peft does, whole or not at all. Every worker of a machine writes the same, and the first one's stays. The
    newest `KEPT` directories beside it are kept, this one whatever the clock says, for an adapter is loaded again if the server unloads it meanwhile."""
    from safetensors.torch import save_file

    assert update.adapter
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    coming = Path(tempfile.mkdtemp(dir=target.parent, prefix="."))
    save_file(dict(tensors), coming / "adapter_model.safetensors")
    (coming / "adapter_config.json").write_text(json.dumps(peft_config(update.adapter, manifest)))
    try:
        coming.rename(target)
    except OSError:
        shutil.rmtree(coming)
    others = [path for path in target.parent.glob("[!.]*") if path != target]
    for old in sorted(others, key=lambda path: path.stat().st_mtime)[: 1 - KEPT]:
        shutil.rmtree(old, ignore_errors=True)
