"""The entry point of the group `vllm.general_plugins`, which vLLM calls in each of its processes where headrace is installed beside it."""

from __future__ import annotations

BACKEND = "headrace"
"""The name in `vllm serve --weight-transfer-config '{"backend": "headrace"}'`."""


def register() -> None:
    """May be called several times in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        module = f"{__package__}.transfer_engine"
        WeightTransferEngineFactory.register_engine(BACKEND, module, "HeadraceTransferEngine")
