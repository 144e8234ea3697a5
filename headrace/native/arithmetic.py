"""Names for forward passes: where two have the same name, equal weights give equal log-probs, to the last bit."""

from __future__ import annotations

PROVEN = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "mixtral", "olmoe")
"""The `model_type`s for which `tests/trainer/parity/` compares engine and trainer."""
TIERS = {"bfloat16": ("AMX", "AVX512-BF16"), "float32": ("AMX", "AVX512-BF16", "AVX-512", "AVX2")}
"""The kinds of processor on which engine and trainer round at the same places, by the dtype of the computation. On other kinds the
engine multiplies weights in bfloat16 by activations in float32; float32 was not tried on them."""


def arithmetic(family: str, dtype: str, tier: str) -> str:
    """The name of the arithmetic of the C++ kernels; empty if engine and trainer are not known to agree.

    `tier`: the kind of processor that the kernels were compiled for.
    """
    return f"{family} {dtype} {tier}" if family in PROVEN and tier in TIERS.get(dtype, ()) else ""


def why_unproven(family: str, dtype: str, tier: str) -> str:
    """The reason why `arithmetic` returns no name."""
    if family not in PROVEN:
        return f"the model is of the family {family}, and equal log-probs are proven for {', '.join(PROVEN)}"
    if dtype not in TIERS:
        return f"it computes in {dtype}, and equal log-probs are proven for {', '.join(TIERS)}"
    return f"this processor has {tier}, and equal log-probs in {dtype} are proven for {' and '.join(TIERS[dtype])}"
