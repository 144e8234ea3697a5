"""Recorded experts in the trainer's forward pass: forced where they were recorded, the router's own choice elsewhere, seen again by
layers that are computed twice, and refused where they cannot be forced. (Gradients under all options: `test_replay_matrix`.)"""

from __future__ import annotations

import random
import shutil
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import token_mean
from headrace.commands.installed import parity
from headrace.commands.installed.parity import ParityRow
from headrace.core.batches import Batch, Group, Row
from headrace.core.errors import ConfigError
from headrace.core.types import Prompt, Request, Sampling
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.models.resolve import resolve_model
from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.forward import Forward, choose_forward
from headrace.trainer.forward.routing import RoutingReplay, no_replay
from headrace.trainer.model.causal_lm import enable_checkpointing
from headrace.trainer.packing import Pack, StepRows, pack_rows, pack_sequence
from headrace.trainer.step.reference import reference_of
from headrace.trainer.step.trainer import TorchTrainer
from support import plain_trainer, tiny_models
from support.few import few

MIXTURES = ["qwen3_moe", "qwen3_moe-mixed", "mixtral", "olmoe"]
TOKENS = list(range(3, 20))


@cache
def _chosen(name: str) -> Forward:
    return choose_forward(plain_trainer.model_of(name))


def forward_of(name: str, packed: bool = True) -> Forward:
    model = deepcopy(_chosen(name).model)
    if not packed:
        model.set_attn_implementation("eager")
    return replace(_chosen(name), model=model, packed=packed)


def packs(name: str, shared: bool) -> tuple[Pack, ...]:
    """Of rows with routes, some of which are missing."""
    experts = plain_trainer.experts_of(plain_trainer.model_of(name))
    rows = plain_trainer.rows(random.Random(3), experts=experts)
    return pack_rows(StepRows(rows, token_mean, constant=0, budget=40, step=0, share=shared)).packs


def routed(pack: Pack, name: str, seed: int = 0) -> Pack:
    """Any experts at all."""
    layers, count, k = plain_trainer.experts_of(plain_trainer.model_of(name))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(len(pack.tokens), layers, count, generator=generator).argsort(-1)[..., :k]
    return replace(pack, routing=chosen.to(torch.int16))


def logprobs(forward: Forward, pack: Pack) -> torch.Tensor:
    return forward.logprobs(pack, 1.0, torch.float32).logprob


def gradients(forward: Forward, replay: RoutingReplay, given: tuple[Pack, ...]) -> dict[str, torch.Tensor]:
    for pack in given:
        with replay(pack):
            logprobs(forward, pack).sum().backward()
    return {name: p.grad for name, p in forward.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MIXTURES)
def test_the_experts_that_were_recorded_are_the_ones_that_compute(name):
    forward = forward_of(name)
    replay = RoutingReplay(forward, torch.float32)
    pack = routed(pack_sequence(TOKENS), name)
    used: list[torch.Tensor] = []
    for module_name, module in forward.model.named_modules():
        if module_name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, inputs: used.append(inputs[1]))
    with torch.no_grad(), replay(pack) as replayed:
        logprobs(forward, pack)
    assert torch.equal(torch.stack(used, 1), pack.routing.long())
    assert (replayed.routed, replayed.missing) == (16 * replay.layers, 0)


@pytest.mark.parametrize("name", MIXTURES)
def test_what_was_not_recorded_is_chosen_live_and_counted(name):
    forward = forward_of(name)
    replay = RoutingReplay(forward, torch.float32)
    pack = routed(pack_sequence(TOKENS), name)
    with torch.no_grad():
        live = logprobs(forward, pack)
        with replay(replace(pack, routing=None)) as replayed:
            assert torch.equal(logprobs(forward, pack), live)
        assert replayed.missing == replayed.routed == 16 * replay.layers
        pack.routing[10:] = -1
        with replay(pack) as replayed:
            some = logprobs(forward, pack)
        assert replayed.missing == 6 * replay.layers
        pack.routing[0] = -1
        pack.routing[1:10] = -1
        with replay(pack):
            assert torch.equal(logprobs(forward, pack), live)
    assert not torch.allclose(some, live, atol=1e-3)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "row-by-row"])
@pytest.mark.parametrize("name", few(MIXTURES, keep=2))
def test_layers_that_are_computed_again_see_the_same_routes(name, shared):
    given = packs(name, shared)
    plain, checkpointed = forward_of(name, shared), forward_of(name, shared)
    expected = gradients(plain, RoutingReplay(plain, torch.float32), given)
    replay = RoutingReplay(checkpointed, torch.float32)
    enable_checkpointing(checkpointed.model, replay.checkpoint_contexts)
    again = _count_calls(checkpointed.model)
    found = gradients(checkpointed, replay, given)
    calls = len(given) if shared else sum(len(pack.segments) for pack in given)
    assert again[0] == 2 * calls  # it was indeed computed twice
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        assert torch.allclose(found[parameter], gradient, atol=1e-6), parameter


def _count_calls(model: Any) -> list[int]:
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    model.model.layers[0].self_attn.register_forward_pre_hook(count)
    return calls


def test_a_model_with_adapters_on_experts_and_routers_is_replayed():
    import peft

    forward = forward_of("mixtral")
    model, pack = forward.model, routed(pack_sequence(TOKENS), "mixtral")
    with torch.no_grad(), RoutingReplay(forward, torch.float32)(pack):
        before = logprobs(forward, pack)
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=stacks, lora_dropout=0.0)
    )
    replay = RoutingReplay(forward, torch.float32)
    assert replay.layers == 2
    with replay(pack):
        first = logprobs(forward, pack)
        first.sum().backward()
    assert torch.allclose(first, before, atol=1e-5)  # B is zero
    touched = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert any("mlp.gate" in name for name in touched) and any("mlp.experts" in name for name in touched)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        with replay(pack):
            assert not torch.allclose(logprobs(forward, pack), before, atol=1e-2)
        reference = reference_of(forward, torch.float32, lambda own: RoutingReplay(own, torch.float32))
        assert torch.allclose(reference(pack, 1.0), before, atol=1e-5)
        assert reference.bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", few(["llama-tied-biased", "gemma3_text", "gpt2", "qwen3_moe", "mixtral", "olmoe"], keep=3)
)
def test_the_reference_is_the_policy_bit_for_bit_until_a_weight_moves(name, dtype):
    forward = forward_of(name)
    routes = name in MIXTURES
    reference = reference_of(forward, dtype, lambda own: RoutingReplay(own, dtype) if routes else no_replay)
    pack = routed(pack_sequence(TOKENS), name) if routes else pack_sequence(TOKENS)
    replay = RoutingReplay(forward, dtype) if routes else None
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        scored = reference(pack, 0.7)
        if replay:
            with replay(pack):
                own = forward.logprobs(pack, 0.7, dtype).logprob
        else:
            own = forward.logprobs(pack, 0.7, dtype).logprob
        assert torch.equal(scored, own)
        for parameter in forward.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        assert torch.equal(reference(pack, 0.7), scored)
    assert reference.bytes < 4.1 * sum(p.numel() for p in forward.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_reference_outlives_a_resume(name, dtype, tmp_path):
    algo = AlgoConfig(kl={"coef": 0.1})

    def make() -> TorchTrainer:
        return TorchTrainer(
            tiny_models.saved(name), TrainConfig(dtype=dtype, device="cpu", learning_rate=1e-2), algo, 0
        )

    one = make()
    assert one.step(batch(name, 0)).reference_kl == 0  # bit for bit, kernels or not
    one.save(tmp_path)
    resumed = make()
    resumed.restore(tmp_path)
    second, again = one.step(batch(name, 1)), resumed.step(batch(name, 1))
    assert second.reference_kl == again.reference_kl > 1e-5


def batch(name: str, step: int) -> Batch:
    experts = plain_trainer.experts_of(plain_trainer.model_of(name))
    rows = plain_trainer.rows(random.Random(step), experts=experts if experts[0] else None)
    return Batch(step, (Group(0, Prompt("p", "", (1,)), (), tuple(rows)),))


# -- from the engine to the trainer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
def test_routes_of_the_engine_bring_the_trainer_back_to_its_log_probs(name):
    """The trainer's routers have moved, as by a version or two: with the routes replayed, only their weights differ."""
    rows = sampled(name)
    forward = forward_of(name)
    (pack,) = pack_rows(StepRows(rows, token_mean, constant=0, budget=4096, step=0)).packs
    replay = RoutingReplay(forward, torch.float32)
    with torch.no_grad():
        with replay(pack) as replayed:
            equal = (logprobs(forward, pack) - pack.sampled).abs().max()
        assert replayed.missing == 0
        assert float(equal) < 1e-4
        generator = torch.Generator().manual_seed(0)
        for (router,) in replay._routers.modules:
            weight = router.weight
            weight.add_(0.05 * weight.std() * torch.randn(weight.shape, generator=generator))
        live = (logprobs(forward, pack) - pack.sampled).abs().max()
        with replay(pack):
            forced = (logprobs(forward, pack) - pack.sampled).abs().max()
    assert float(forced) < float(live)


def sampled(name: str) -> list[Row]:
    """Three completions of each of two prompts, by the native engine."""
    config = EngineConfig(dtype="float32", device="cpu", kv_gib=0.05, max_running=4, context_length=96, routing=True)
    engine = NativeEngine(tiny_models.saved(name), config)
    tensors = parameters_from_dir(tiny_models.saved(name), torch.float32)
    engine.swap(engine.prepare(WeightUpdate(version=0, kind="full", fingerprint="", nbytes=0, seconds=0.0), tensors))
    prompts = {str(n): tuple(prompt) for n, prompt in enumerate(tiny_models.prompts(9, 4) * 3)}
    for number, prompt in prompts.items():
        engine.add(Request(number, prompt, Sampling(max_tokens=10, seed=int(number)), return_routing=True))
    drawn: dict[str, list[tuple[int, float]]] = {number: [] for number in prompts}
    routes = {}
    while engine.has_work():
        output = engine.step()
        for number, token, logprob in zip(output.request_ids, output.tokens, output.logprobs, strict=True):
            drawn[number].append((token, logprob))
        routes |= {end.request_id: end.routing for end in output.finished}
    rows = []
    for number, prompt in prompts.items():
        tokens, logprobs = zip(*drawn[number], strict=True)
        ones = (1,) * len(tokens)
        rows.append(Row(prompt, tokens, logprobs, ones, (True,) * len(tokens), ones, routing=routes[number]))
    return rows


# -- refusals ---------------------------------------------------------------------------------------------------------------


def test_a_dense_model_is_refused():
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM: it has no top-k routers; set rollout.keep_routing = false"
    ):
        RoutingReplay(forward_of("llama"), torch.float32)


class Sorting(torch.nn.Module):
    """A router that chooses without a call that could be asked."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.weight, self.top_k = gate.weight, gate.top_k

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        probability, experts = logits.softmax(-1).sort(-1, descending=True)
        return logits, probability[:, : self.top_k], experts[:, : self.top_k]


def test_a_choice_that_is_not_seen_in_one_layer_is_refused():
    forward = forward_of("mixtral")
    mlp = forward.model.model.layers[1].mlp
    mlp.gate = Sorting(mlp.gate)
    with pytest.raises(ConfigError, match=r"MixtralForCausalLM: model.layers.1 has experts, and no choice .* is seen"):
        RoutingReplay(forward, torch.float32)


def test_experts_that_do_not_heed_the_routers_output_are_refused():
    forward = forward_of("olmoe")
    for layer in forward.model.model.layers:
        mlp, own = layer.mlp, Sorting(layer.mlp.gate)
        mlp.forward = lambda hidden, mlp=mlp, own=own: (
            mlp.experts(hidden[0], *reversed(own(hidden[0])[1:]))[None] + 0 * mlp.gate(hidden[0])[1].sum()
        )
    with pytest.raises(ConfigError, match="its experts do not use what its routers return"):
        RoutingReplay(forward, torch.float32)


@pytest.mark.parametrize("shape", [(16, 1, 2), (16, 2, 3)])
def test_routes_of_another_model_are_refused(shape):
    replay = RoutingReplay(forward_of("mixtral"), torch.float32)
    pack = replace(pack_sequence(TOKENS), routing=torch.zeros(shape, dtype=torch.int16))
    with pytest.raises(ValueError, match="sample with the model that is trained"), replay(pack):
        pass
    with pytest.raises(ValueError, match="experts up to 4"), replay(replace(pack, routing=torch.full((16, 2, 2), 4))):
        pass


def test_a_pass_that_leaves_tokens_out_does_not_go_unnoticed():
    forward = forward_of("mixtral")
    replay = RoutingReplay(forward, torch.float32)
    pack = routed(pack_sequence(TOKENS), "mixtral")
    with torch.no_grad():
        with pytest.raises(AssertionError, match="did not have every token"), replay(pack):
            pass
        with pytest.raises(AssertionError, match="did not have every token"), replay(pack):
            logprobs(forward, pack_sequence(TOKENS[:9]))
        with replay(pack):  # and nothing is left behind
            logprobs(forward, pack)
        assert not forward.model.model.layers[0].mlp.gate._forward_hooks


def test_the_trainer_counts_missing_routes():
    one = TorchTrainer(
        tiny_models.saved("olmoe"), TrainConfig(dtype="float32", device="cpu"), AlgoConfig(), 0, keep_routing=True
    )
    given = batch("olmoe", 0)
    rows = [replace_routing(row) for row in given.rows]
    full = one.step(Batch(0, (Group(0, Prompt("p", "", (1,)), (), tuple(rows)),)))
    assert full.missing_routes == 0
    assert (
        0 < one.step(replace_step(given, 1)).missing_routes < one.step(replace_step(unrouted(given), 2)).missing_routes
    )


def replace_routing(row: Row) -> Row:
    experts = plain_trainer.experts_of(plain_trainer.model_of("olmoe"))
    routes = plain_trainer.routes_of((row.prompt + row.tokens)[:-1], experts)
    return msgspec.structs.replace(row, routing=plain_trainer.trace(routes))


def unrouted(given: Batch) -> Batch:
    rows = tuple(msgspec.structs.replace(row, routing=None) for row in given.rows)
    return Batch(given.step, (Group(0, Prompt("p", "", (1,)), (), rows),))


def replace_step(given: Batch, step: int) -> Batch:
    return Batch(step, given.groups)


# -- on a real model --------------------------------------------------------------------------------------------------------


def upcycled(source: Path, to: Path) -> Path:
    """Every expert is the dense model's MLP with 5 % noise, the router random: a mixture that speaks (arXiv:2212.05055)."""
    dense = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    shared = {
        name: value for name, value in dense.config.to_dict().items() if name not in ("model_type", "architectures")
    }
    torch.manual_seed(0)
    sparse = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**shared, num_local_experts=4, num_experts_per_tok=2)
    )
    weights = dense.state_dict()
    for layer in range(dense.config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp"
        gate, up, down = (weights.pop(f"{mlp}.{part}_proj.weight") for part in ("gate", "up", "down"))
        for name, dense_part in (("gate_up_proj", torch.cat([gate, up])), ("down_proj", down)):
            noise = 0.05 * dense_part.std() * torch.randn(4, *dense_part.shape)
            weights[f"{mlp}.experts.{name}"] = dense_part + noise
    missing, foreign = sparse.load_state_dict(weights, strict=False)
    assert not foreign and all(name.endswith("mlp.gate.weight") for name in missing)
    sparse.to(torch.bfloat16).save_pretrained(to)
    for file in (*source.glob("*token*"), *source.glob("*.jinja")):
        shutil.copyfile(file, to / file.name)
    return to


def by_telling(model_dir: Path) -> dict[tuple[str, str], ParityRow]:
    """Of the engine's fastest path, by what was sampled and what was replayed."""
    found: dict[tuple[str, str], ParityRow] = {}
    for one in parity.measure(model_dir, ("bfloat16",), tokens=32):
        if not one.absent:
            found.setdefault((one.sampling, one.replayed), one)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{"top_p": 0.95}, {"top_k": 20}, {"top_p": 0.95, "top_k": 20}], ids=str)
def test_a_replayed_mask_brings_truncated_sampling_to_the_level_of_plain_sampling(cut, monkeypatch):
    monkeypatch.setattr(parity, "FILTERS", {"cut": cut})
    monkeypatch.setattr(parity, "PATHS", ("fused",))
    found = by_telling(resolve_model("smollm2-135m-instruct"))
    plain, told, untold = found["plain", ""], found["cut", "mask"], found["cut", "no mask"]
    assert told.mean < 1.5 * plain.mean and told.p99 < 2 * plain.p99
    assert untold.mean > 1.5 * told.mean


@pytest.mark.slow
def test_replayed_experts_lower_the_mismatch_of_a_mixture(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "FILTERS", {})
    monkeypatch.setattr(parity, "PATHS", ("fused",))
    found = by_telling(upcycled(resolve_model("smollm2-135m-instruct"), tmp_path))
    told, untold = found["plain", "experts"], found["plain", "no experts"]
    # Most of the mean is what bfloat16 rounds; another expert for a token is what makes large differences, of which the largest is one token's chance.
    assert told.p99 < untold.p99 and told.mean < 1.1 * untold.mean
