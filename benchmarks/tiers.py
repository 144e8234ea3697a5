"""How fast does each way of serving sample, beside transformers' `generate` on the same model?

    python benchmarks/tiers.py [--types gpt_oss,lfm2_moe] [--rounds 3] [--sequences 16,64] [--beside hf]

A model of random weights of each type, of 20 to 40 million parameters in float32, samples 32 tokens for each of many prompts of 20 to 60 tokens, log-probs
included: by the engine in the way that `auto` chooses, by the engine over the model's own cache (`engine.path = "cache"`; `--beside` names another way), and by
`generate` on one left-padded batch. All in this process on one thread, one after the other in every round, in turns. Rates are tokens per second of processor time, which others on the
machine disturb less than the clock; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from headrace.core.types import Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.models.saved_buffers import saved_buffers

VOCABULARY, TOKENS, CONTEXT = 8192, 32, 96
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 48,
    "intermediate_size": 1024, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
LINEAR = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
TYPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "olmo2": {},
    "gemma2": {"sliding_window": 64},
    "gemma4_text": {
        "sliding_window": 64, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2, "num_kv_shared_layers": 4, "global_head_dim": 96,
        "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCABULARY,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256, "sliding_window": 64},
    "deepseek_v3": {
        **EXPERTS, "num_key_value_heads": 8, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "q_lora_rank": 192, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32, "v_head_dim": 48, "head_dim": 32,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1,
        },
    },
    "cohere2": {"sliding_window": 64, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0] * 2},
    "granite": {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "attention_multiplier": 0.0208},
    "lfm2": {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", "full_attention"] * 2 + ["conv", "full_attention"]},
    "lfm3": {"sliding_window": 64, "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention", "conv", "full_attention", "conv"]},
    "lfm2_moe": {**EXPERTS, "num_experts": 8, "num_dense_layers": 2, "layer_types": ["conv", "conv", "conv", "full_attention"] * 2},
    "qwen3_5_text": {**LINEAR, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2},
    "qwen3_next": {**EXPERTS, **LINEAR, "num_experts": 8, "shared_expert_intermediate_size": 256, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2},
    "granitemoehybrid": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256, "shared_intermediate_size": 512, "mamba_n_heads": 16, "mamba_d_head": 48,
        "mamba_d_state": 64, "layer_types": (["mamba"] * 3 + ["attention"]) * 2, "residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
    },
    "falcon_h1": {
        "mamba_d_ssm": 768, "mamba_n_heads": 16, "mamba_d_head": 48, "mamba_d_state": 64, "num_hidden_layers": 6, "mamba_rms_norm": True, "key_multiplier": 0.4,
        "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.35], "mlp_multipliers": [0.9, 0.3], "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.24,
    },
    "nemotron_h": {
        **EXPERTS, "layers_block_type": ["linear_attention", "moe", "linear_attention", "mlp", "full_attention", "moe"] * 2, "mamba_num_heads": 16, "mamba_head_dim": 48,
        "n_groups": 2, "ssm_state_size": 64, "n_routed_experts": 8, "moe_shared_expert_intermediate_size": 512, "rescale_prenorm_residual": False,
    },
    "mamba2": {"num_heads": 16, "head_dim": 48, "n_groups": 1, "state_size": 64, "expand": 2},
}  # fmt: skip
"""What the config of a type has beside `COMMON`."""

OTHER_WAYS = {"cache": "own cache", "hf": "hugging face"}
"""Values of `engine.path` that a model's usual way may be compared with, and how such paths begin."""

Sample = Callable[[list[list[int]], int], None]


def made(model_type: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**COMMON, **TYPES[model_type]})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def engine_of(model: Any, directory: Path, sequences: int, path: str) -> tuple[Sample, str]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        kv_gib=1.0,
        max_running=sequences,
        context_length=CONTEXT,
        path=path,  # type: ignore[arg-type]  # one of its values
    )
    engine = NativeEngine(directory, config)
    tensors = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *saved_buffers(model).items())}
    engine.swap(engine.prepare(WeightUpdate(version=0, kind="full", fingerprint="", nbytes=0, seconds=0.0), tensors))

    def sample(prompts: list[list[int]], seed: int) -> None:
        for index, prompt in enumerate(prompts):
            sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, seed=index)
            engine.add(Request(f"{seed}/{index}", tuple(prompt), sampling))
        done = 0
        while engine.has_work():
            output = engine.step()
            done += len(output.tokens)
            for finished in output.finished:
                assert finished.stop == "length", finished.error
        assert done == TOKENS * len(prompts)

    return sample, engine.capabilities.path


def generate_of(model: Any) -> Sample:
    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, max_new_tokens=TOKENS, min_new_tokens=TOKENS)  # fmt: skip

    def sample(prompts: list[list[int]], seed: int) -> None:
        torch.manual_seed(seed)
        width = max(map(len, prompts))
        rows = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(rows, attention_mask=mask, generation_config=config, output_logits=True, return_dict_in_generate=True)  # fmt: skip
        assert out.sequences.shape[1] == width + TOKENS
        for column, logits in enumerate(out.logits):
            logits.log_softmax(-1).gather(1, out.sequences[:, width + column, None])

    return sample


def prompts_of(sequences: int, seed: int) -> list[list[int]]:
    lengths, tokens = random.Random(0), random.Random(seed)
    return [[tokens.randrange(3, VOCABULARY) for _ in range(lengths.randint(20, 60))] for _ in range(sequences)]


def measured(model_type: str, sequences: int, rounds: int, beside: str) -> list[str]:
    """The cells of a row: the way that `auto` chooses, tokens per second, ratios. `beside`: the other way."""
    model = made(model_type)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / model_type
        model.save_pretrained(directory)
        auto, path = engine_of(model, directory, sequences, "auto")
        contenders = {"auto": auto, "generate": generate_of(model)}
        if not path.startswith(OTHER_WAYS[beside]):
            contenders["beside"] = engine_of(model, directory, sequences, beside)[0]
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for sample in contenders.values():
        sample(prompts_of(sequences, 1000), 1000)
    for number in range(rounds):
        prompts, order = prompts_of(sequences, number), list(contenders)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            started = time.process_time()
            contenders[name](prompts, number)
            rates[name].append(sequences * TOKENS / (time.process_time() - started))
    rates.setdefault("beside", rates["auto"])
    ratios = {name: [ours / theirs for ours, theirs in zip(rates[name], rates["generate"], strict=True)] for name in ("auto", "beside")}  # fmt: skip
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return [
        f"{model_type} ({millions:.0f} M)",
        str(sequences),
        path.removesuffix(f" {model_type}"),
        *(f"{statistics.median(rates[name]):.0f}" for name in ("auto", "beside", "generate")),
        *(f"{statistics.median(found):.2f} ({min(found):.2f}–{max(found):.2f})" for found in ratios.values()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(TYPES), help=f"of {','.join(TYPES)}")
    parser.add_argument("--sequences", default="16,64")
    parser.add_argument("--beside", choices=OTHER_WAYS, default="cache")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    other = OTHER_WAYS[given.beside]
    print(f"| model | sequences | way | tokens/s | {other} | `generate` | ÷ `generate` | {other} ÷ `generate` |")
    print("|---|---|---|---|---|---|---|---|")
    for model_type in given.types.split(","):
        for sequences in map(int, given.sequences.split(",")):
            print(f"| {' | '.join(measured(model_type, sequences, given.rounds, given.beside))} |", flush=True)


if __name__ == "__main__":
    main()
