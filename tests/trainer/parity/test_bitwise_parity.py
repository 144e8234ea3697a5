"""train.parity = "bitwise": a batch whose log-probs are not the sampler's is not trained, and the layer is named."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any

import pytest
import torch
from equal_models import engine_of, sampled_by
from msgspec.structs import replace
from torch import Tensor

import headrace
from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.errors import ConfigError
from headrace.core.reports import Capabilities
from headrace.core.types import Completion, Prompt, Request, Sampling, VersionSpan
from headrace.durable.journal import read_steps
from headrace.models.lora import LoraConfig
from headrace.native.arithmetic import arithmetic
from headrace.run.config import check, load_config
from headrace.run.needs import check_parity
from headrace.run.worker.first_difference import explained
from headrace.run.worker.worker_messages import TrainerStart
from headrace.trainer.config import TrainConfig
from headrace.trainer.kernels import binding
from headrace.trainer.step.bitwise import UnequalLogprobs
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer
from headrace.weight_sync.shared_memory import SharedMemory
from support import tiny_models
from support.few import few
from support.tiny_run import tiny_config

DTYPES = [dtype for dtype in ("bfloat16", "float32") if arithmetic("llama", dtype, binding.tier() or "")]
DTYPE = DTYPES[0] if DTYPES else "float32"
proven = pytest.mark.skipif(not DTYPES, reason="the mode is refused on this processor")

_saved = TemporaryDirectory(prefix="headrace-bitwise-")


@cache
def saved(name: str) -> Path:
    """Heads that the engine's kernels serve."""
    sizes = {"head_dim": 16, "intermediate_size": 48}
    if name == "olmoe":  # its norms are as wide as the model
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    tiny_models.make(name, **sizes, **({"moe_intermediate_size": 48} if "moe" in name else {})).save_pretrained(
        directory := Path(_saved.name) / name
    )
    return directory


def trainer_of(name: str, keep_routing: bool = False, **settings: Any) -> TorchTrainer:
    return TorchTrainer(
        keep_routing=keep_routing,
        model_dir=saved(name),
        config=TrainConfig(**{"parity": "bitwise", "dtype": DTYPE, "learning_rate": 1e-3, **settings}),
        algo=AlgoConfig(name="reinforce"),
        seed=0,
    )


def sampled(
    trainer: TorchTrainer, name: str, version: int = 0, *, adapter: str = "", routing: bool = False, **settings: Any
) -> list[Row]:
    """By an engine that has the trainer's weights."""
    adapters = {spec.name: (spec, dict(trainer.parameters(spec.name))) for spec in trainer.adapters()}
    weights, dtype = dict(trainer.parameters()), getattr(torch, trainer.dtype)
    options = {"adapters": adapters, "version": version, "context_length": 96, "routing": routing}
    engine = engine_of(saved(name), weights, dtype, **options)
    requests = [
        Request(
            f"r{i}",
            tuple(range(3, 10 + 8 * (i % 2))),
            Sampling(max_tokens=20, seed=i, ignore_eos=True, **settings),
            adapter=adapter,
            return_mask=bool(settings),
            return_routing=routing,
        )
        for i in range(4)
    ]
    rows = sampled_by(engine, requests)[adapter]
    return [replace(row, advantages=(float(i % 2) - 0.5,) * 20) for i, row in enumerate(rows)]


def batch(step: int, rows: Sequence[Row]) -> Batch:
    group = Group(ticket=step, prompt=Prompt(id="p", text="", tokens=rows[0].prompt), scored=(), rows=tuple(rows))
    return Batch(step, (group,))


def weights_of(trainer: TorchTrainer) -> list[Tensor]:
    return [value.clone() for _, value in trainer.parameters()]


def rounded_once_more(module: Any) -> None:
    """The planted fault: the last bit of what a module returns is rounded off, eight in float32, of which one may vanish in a log-prob."""
    own = module.forward

    def forward(_: Any, *given: Tensor) -> Tensor:
        y: Tensor = own(*given)
        kind, bits = (torch.int16, 1) if y.dtype == torch.bfloat16 else (torch.int32, 8)
        return (y.view(kind) & (-1 << bits)).view(y.dtype)

    module.forward = MethodType(forward, module)


@proven
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", few(["llama3-rope", "mistral-sliding", "qwen2", "qwen3", "qwen3_moe-mixed", "mixtral", "olmoe"], keep=3)
)
def test_what_the_trainers_weights_sampled_is_trained(name: str, dtype: str) -> None:
    trainer = trainer_of(name, dtype=dtype)
    for step in range(2):
        rows = sampled(trainer, name, step)
        report = trainer.step(batch(step, rows))
        assert report.version == step + 1 and report.bitwise_tokens == report.loss_tokens == 80


@proven
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_rounding_in_one_layer_is_named_and_nothing_is_trained(layer: int, dtype: str) -> None:
    trainer = trainer_of("qwen3", dtype=dtype)
    rows, before = sampled(trainer, "qwen3"), weights_of(trainer)
    rounded_once_more(trainer._model.model.layers[layer].post_attention_layernorm)
    with pytest.raises(UnequalLogprobs, match="step 0 was not trained.* of 80 tokens") as caught:
        trainer.step(batch(0, rows))
    assert trainer.version == 0 and all(map(torch.equal, weights_of(trainer), before))
    assert all(parameter.grad is None for parameter in trainer._model.parameters())
    assert f"first differ in layer {layer}: " in str(explained(caught.value, trainer, start_of("qwen3", dtype)))
    del trainer._model.model.layers[layer].post_attention_layernorm.forward


@proven
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, layer", [("qwen3_moe-mixed", 0), ("qwen3_moe-mixed", 1), ("olmoe", 1)])
def test_a_rounding_in_one_mixture_is_named(name: str, layer: int, dtype: str) -> None:
    """A dense layer and a mixture of one model; experts, whose results are rounded before they are added."""
    trainer = trainer_of(name, dtype=dtype)
    rows, mlp = sampled(trainer, name), trainer._model.model.layers[layer].mlp
    rounded_once_more(
        mlp.experts if hasattr(mlp, "experts") else trainer._model.model.layers[layer].post_attention_layernorm
    )
    with pytest.raises(UnequalLogprobs, match="step 0 was not trained.* of 80 tokens") as caught:
        trainer.step(batch(0, rows))
    assert f"first differ in layer {layer}: " in str(explained(caught.value, trainer, start_of(name, dtype)))


@proven
@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_experts_are_trained_and_one_that_is_not_the_samplers_is_found(dtype: str) -> None:
    trainer = trainer_of("mixtral", dtype=dtype, keep_routing=True)
    for step in range(2):
        rows = sampled(trainer, "mixtral", step, routing=True)
        report = trainer.step(batch(step, rows))
        assert report.version == step + 1 and report.bitwise_tokens == report.loss_tokens == 80
    rows = sampled(trainer, "mixtral", 2, routing=True)
    routing = rows[0].routing
    assert routing is not None and (routing.layers, routing.k, routing.width) == (2, 2, 1)
    other = next(expert for expert in range(4) if expert not in routing.experts[:2])
    experts = bytes([other, *routing.experts[1:]])  # of the first token, in the first layer
    with pytest.raises(UnequalLogprobs, match="step 2 was not trained"):
        trainer.step(batch(2, [replace(rows[0], routing=replace(routing, experts=experts)), *rows[1:]]))


@proven
def test_the_embedding_the_head_and_the_engines_process_are_told_apart() -> None:
    trainer = trainer_of("llama3-rope")
    rows = sampled(trainer, "llama3-rope")
    rounded_once_more(trainer._model.model.norm)
    with pytest.raises(UnequalLogprobs) as caught:
        trainer.step(batch(0, rows))
    assert "differ in the final norm or the head" in str(explained(caught.value, trainer, start_of("llama3-rope")))
    other = trainer_of("llama3-rope")
    wrong = replace(rows[0], logprobs=(-1.0,) * 20)
    with pytest.raises(UnequalLogprobs) as caught:
        other.step(batch(0, [*rows[1:], wrong]))
    assert "in the process that served it" in str(explained(caught.value, other, start_of("llama3-rope")))


def start_of(name: str, dtype: str = DTYPE) -> TrainerStart:
    with_nothing = SharedMemory.open()
    try:
        return TrainerStart(
            model_dir=str(saved(name)),
            train={},
            algo={},
            seed=0,
            serving_dtype=dtype,
            keep_routing=False,
            transport=with_nothing,
        )
    finally:
        with_nothing.close()


@proven
def test_what_older_weights_had_a_part_in_is_not_compared() -> None:
    """Neither what they sampled, nor what was sampled over their cache entries."""
    trainer = trainer_of("qwen2")
    rows = sampled(trainer, "qwen2")
    assert trainer.step(batch(0, rows)).version == 1
    assert trainer.step(batch(1, rows)).bitwise_tokens == 0, "these are of version 0"
    mixed = [replace(row, versions=(2,) * 20) for row in rows]
    assert trainer.step(batch(2, mixed)).bitwise_tokens == 0, "over keys and values of version 0"
    plain = [replace(row, versions=(3,) * 20, kv_versions=()) for row in rows]
    with pytest.raises(UnequalLogprobs):
        trainer.step(batch(3, plain))


def test_a_completion_says_over_which_versions_each_token_was_sampled() -> None:
    spans = (VersionSpan(0, 2, 2), VersionSpan(2, 3, 2))
    done = Completion(tokens=(5, 6, 7), logprobs=(0.0,) * 3, spans=spans, stop="stop")
    assert (done.versions(), done.kv_versions()) == ([2, 2, 3], [2, 2, 2])


@pytest.mark.parametrize(
    "sets, words",
    [
        ({"engine": {"path": "fused"}}, 'engine.path = "fused"'),
        ({"train": {"path": "torch"}}, 'train.path = "torch"'),
        ({"engine": {"device": "cuda"}}, "engine.device"),
        ({"engine": {"dtype": "float32"}, "train": {"dtype": "bfloat16"}}, "in one dtype"),
        ({"train": {"weights": "bfloat16", "dtype": "bfloat16"}}, "train.weights"),
        ({"lora": {"rank": 4, "publish": "merged"}}, "lora.publish"),
        ({"lora": {"rank": 4, "quantise": "int8"}}, "lora.quantise"),
        ({"lora": {"rank": 4, "experts": True}}, "lora.experts"),
        ({"rollout": {"top_p": 0.9, "keep_mask": False}}, "rollout.keep_mask"),
    ],
)
def test_settings_for_which_it_is_not_proven_are_refused(sets: dict[str, Any], words: str, tmp_path: Path) -> None:
    tables = {"engine": {"dtype": "bfloat16"}, "train": {"dtype": "bfloat16"}}
    own = {name: {**tables.get(name, {}), **sets.get(name, {})} for name in {*tables, *sets}}
    own["train"]["parity"] = "bitwise"
    with pytest.raises(ConfigError) as caught:
        load_config(tiny_config(tmp_path, tmp_path, **own))
    assert words in str(caught.value) and 'train.parity = "bitwise"' in str(caught.value)
    own["train"]["parity"] = "off"
    assert not check(load_config(tiny_config(tmp_path, tmp_path, **own)))


@pytest.mark.parametrize(
    "name, settings, words",
    [
        ("gpt_neox", {}, "family gpt_neox"),
        ("qwen2", {"path": "torch"}, "does not run through the C"),
    ],
)
def test_a_model_for_which_it_is_not_proven_is_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer_of(name, **settings)
    assert trainer_of(name, parity="off", **settings).arithmetic == ""


@pytest.mark.parametrize(
    "name, lora, words",
    [("", {}, "merged"), ("policy", {"quantise": "int8"}, "quantised"), ("policy", {"dora": True}, "merged")],
)
def test_adapters_that_are_computed_otherwise_are_refused(name: str, lora: dict[str, Any], words: str) -> None:
    algo, train = AlgoConfig(name="reinforce"), TrainConfig(parity="bitwise", dtype=DTYPE)
    adapters = {name: Assignment(train, algo, LoraConfig(rank=2, **lora))}
    with pytest.raises(ConfigError, match=words):
        TorchTrainer(saved("qwen2"), train, algo, 0, adapters=adapters)


@proven
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_adapter_sampled_is_trained_and_a_factor_in_one_layer_is_named(dtype: str) -> None:
    """Tokens drawn from a part of the vocabulary, in two steps. Then one layer scales the adapter otherwise."""
    algo, train = AlgoConfig(name="reinforce"), TrainConfig(parity="bitwise", dtype=dtype, learning_rate=0.05)
    lora = {"policy": Assignment(train, algo, LoraConfig(rank=4, alpha=9.0))}
    trainer = TorchTrainer(saved("qwen3"), train, algo, 0, adapters=lora)
    for step in range(2):
        rows = sampled(trainer, "qwen3", step, adapter="policy", top_p=0.9)
        report = trainer.step(replace(batch(step, rows), adapter="policy"))
        assert report.version == step + 1 and report.bitwise_tokens == report.loss_tokens == 80
    rows = sampled(trainer, "qwen3", 2, adapter="policy", top_p=0.9)
    scaling = trainer._model.model.layers[1].self_attn.o_proj.scaling
    scaling.update({name: 1.0625 * scale for name, scale in scaling.items()})
    before = [value.clone() for _, value in trainer.parameters("policy")]
    with pytest.raises(UnequalLogprobs, match="step 2 was not trained") as caught:
        trainer.step(replace(batch(2, rows), adapter="policy"))
    assert all(map(torch.equal, before, (value for _, value in trainer.parameters("policy"))))
    assert "first differ in layer 1: " in str(explained(caught.value, trainer, start_of("qwen3", dtype), "policy"))


@proven
def test_a_mask_that_was_recorded_wrongly_stops_the_run() -> None:
    trainer = trainer_of("qwen2")
    rows = sampled(trainer, "qwen2", top_k=5)
    first, *others = rows
    wrong = replace(first, sampling_mask=others[0].sampling_mask)
    with pytest.raises(UnequalLogprobs, match="of 80 tokens"):
        trainer.step(batch(0, [wrong, *others]))


def test_two_forward_passes_are_refused(tmp_path: Path) -> None:
    config = load_config(tiny_config(tmp_path, tmp_path, train={"parity": "bitwise", "dtype": "auto"}))
    served = Capabilities(64, "kernels llama", arithmetic="llama bfloat16 AMX")
    check_parity(served, "llama bfloat16 AMX", "bitwise")
    with pytest.raises(
        ConfigError, match="the engine computes llama bfloat16 AMX where the trainer computes llama float32 AMX"
    ):
        check_parity(served, "llama float32 AMX", config.train.parity)


@pytest.fixture
def served(tiny_llama: Path, tmp_path: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = shutil.copytree(tiny_llama, tmp_path / "model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny_llama, head_dim=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture
def served_mixture(tiny_llama: Path, tmp_path: Path) -> Path:
    """A mixture with the tokenizer of the tiny model."""
    from transformers import AutoConfig, MixtralConfig, MixtralForCausalLM

    directory = shutil.copytree(tiny_llama, tmp_path / "mixture")
    torch.manual_seed(0)
    dense = AutoConfig.from_pretrained(tiny_llama).to_dict()
    shared = {key: value for key, value in dense.items() if key not in ("model_type", "architectures", "head_dim")}
    config = MixtralConfig(**shared, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    MixtralForCausalLM(config).save_pretrained(directory)
    return directory


@proven
def test_a_model_that_the_engines_kernels_do_not_serve_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tiny_llama, train={"parity": "bitwise", "dtype": DTYPE}, engine={"dtype": DTYPE})
    with pytest.raises(ConfigError, match="kernels|bit for bit"):
        headrace.train(config)


@pytest.mark.slow
@proven
def test_a_run_with_the_mode_on(served: Path, tmp_path: Path) -> None:
    """Synchronous, so that every token is at lag 0; and then asynchronous."""
    auto = {"dtype": "auto"}
    for name, lag in (("on-policy", 0), ("asynchronous", 1)):
        config = tiny_config(
            tmp_path,
            served,
            name=name,
            train={"parity": "bitwise", "steps": 4, **auto},
            engine=auto,
            staleness={"max_lag": lag},
        )
        result = headrace.train(config)
        assert result.reason == "finished" and result.step == 4
        reports = [entry.report for entry in read_steps(result.directory)]
        assert len(reports) == 4 and reports[0].bitwise_tokens == reports[0].loss_tokens > 0
        if not lag:
            assert all(report.bitwise_tokens == report.loss_tokens for report in reports)


@proven
def test_a_run_of_a_mixture_with_recorded_experts(served_mixture: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        served_mixture,
        train={"parity": "bitwise", "steps": 4, "dtype": "auto"},
        engine={"dtype": "auto"},
        rollout={"keep_routing": True},
        staleness={"max_lag": 0},
    )
    result = headrace.train(config)
    assert result.reason == "finished" and result.step == 4
    reports = [entry.report for entry in read_steps(result.directory)]
    assert all(report.bitwise_tokens == report.loss_tokens > 0 for report in reports)
