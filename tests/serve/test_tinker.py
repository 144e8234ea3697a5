"""The official client of the Tinker API trains adapters through `headrace serve --train`, on the real trainer and engine."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker_server import KEY, PLACES, Running, running
from transformers import AutoModelForCausalLM

TEXT = [1, *[5, 9, 13, 6, 10] * 2, 5]
ADAM = types.AdamParams(learning_rate=0.01, eps=1e-8)


@pytest.fixture(scope="module")
def teachable(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_llama` with larger embeddings. Its own are so small that no hidden state makes a token likely."""
    directory = tmp_path_factory.mktemp("teachable")
    shutil.copytree(tiny_llama, directory, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(7)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def server(teachable: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(teachable, tmp_path_factory.mktemp("tinker")) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[tinker.ServiceClient]:
    with server.client() as found:
        yield found


def trained(client: tinker.ServiceClient, seed: int = 1, rank: int = 4, **more: Any) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="tiny", rank=rank, seed=seed, **more).result()


def supervised(tokens: list[int] = TEXT, prompt: int = 3) -> types.Datum:
    targets = tokens[1:]
    weights = [0.0] * (prompt - 1) + [1.0] * (len(targets) - prompt + 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )


def step(
    model: tinker.TrainingClient, data: list[types.Datum], loss: str = "cross_entropy", adam: types.AdamParams = ADAM
) -> float:
    passed, stepped = model.forward_backward(data, loss), model.optim_step(adam)
    stepped.result()
    return passed.result().metrics["loss:sum"]


def scored(model: tinker.TrainingClient) -> list[float]:
    return model.forward([supervised()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()


def greedy(tokens: int = 8) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=tokens, temperature=0.0, stop=[])


PROMPT = types.ModelInput.from_ints(TEXT[:3])


def test_a_supervised_loss_goes_down_and_what_is_sampled_is_what_was_taught(
    server: Running, client: tinker.ServiceClient, teachable: Path
) -> None:
    model = trained(client)
    plain = AutoModelForCausalLM.from_pretrained(teachable, dtype=torch.float32)
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([TEXT[:-1]])).logits[0].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]
    np.testing.assert_allclose(scored(model), expected.numpy(), rtol=1e-4, atol=1e-4)
    losses = [step(model, [supervised()]) for _ in range(30)]
    assert losses[0] == pytest.approx(-float(expected[2:].sum()), rel=1e-4)
    assert losses[-1] < 0.2 * losses[0], losses
    sampler = model.save_weights_and_get_sampling_client().result()
    sequence = sampler.sample(PROMPT, 1, greedy(9)).result().sequences[0]
    assert sequence.tokens == TEXT[3:], "the engine samples from the weights of the last step"
    assert sequence.sequence_id.endswith("@v30") and sequence.stop_reason == "length"
    np.testing.assert_allclose(sequence.logprobs, scored(model)[2:], rtol=1e-3, atol=1e-3)
    logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
    assert logprobs[0] is None
    np.testing.assert_allclose(logprobs[1:], scored(model), rtol=1e-3, atol=1e-3)
    report = server.call("/headrace/training")[1]["sessions"][client.holder.get_session_id()]
    assert report["models"][model.model_id] | {"forward_tokens": 0} == {
        "version": 30,
        "lora_rank": 4,
        "lost": None,
        "forward_tokens": 0,
        "trained_tokens": 30 * 11,
        "steps": 30,
        "saves": 1,
    }
    (sampled,) = report["samplers"].values()
    assert (sampled["samples"], sampled["version"], sampled["sampled_tokens"]) == (2, 30, 9 + 1)


def test_a_reward_goes_up_with_importance_sampling(client: tinker.ServiceClient) -> None:
    model = trained(client, seed=3)
    good = set(range(10, 20))

    def reward(tokens: list[int]) -> float:
        return float(np.mean([token in good for token in tokens]))

    means = []
    for _ in range(15):
        sampler = model.save_weights_and_get_sampling_client().result()
        drawn = sampler.sample(PROMPT, 24, types.SamplingParams(max_tokens=5, stop=[])).result().sequences
        rewards = [reward(one.tokens) for one in drawn]
        means.append(float(np.mean(rewards)))
        data = []
        for one, got in zip(drawn, rewards, strict=True):
            ahead = PROMPT.length - 1
            inputs = {
                "target_tokens": [0] * ahead + one.tokens,
                "logprobs": [0.0] * ahead + one.logprobs,
                "advantages": [0.0] * ahead + [(got - means[-1]) / 24] * len(one.tokens),
            }
            tokens = types.ModelInput.from_ints([*PROMPT.to_ints(), *one.tokens[:-1]])
            data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
        step(model, data, "importance_sampling", types.AdamParams(learning_rate=0.01, eps=1e-8))
    # Samples differ from run to run, and a policy of this rate may lose again what it had: the best three count.
    assert max(np.convolve(means, np.ones(3) / 3, "valid")) > np.mean(means[:2]) + 0.3, means


def test_two_clients_at_once_come_to_what_each_comes_to_alone(server: Running) -> None:
    def run(seed: int) -> tuple[list[float], list[int]]:
        with server.client() as client:
            model = trained(client, seed=seed, rank=2 + seed)
            for number in range(4):
                step(model, [supervised(TEXT[:6] + [20 + seed] * 5), supervised()])
                if number == 1:
                    model.save_weights_for_sampler("early").result()
            sampler = model.save_weights_and_get_sampling_client().result()
            return scored(model), sampler.sample(PROMPT, 1, greedy()).result().sequences[0].tokens

    alone = [run(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, (1, 2)))
    assert together == alone
    assert alone[0] != alone[1]


def test_weights_stay_what_they_were_when_they_were_saved(server: Running, client: tinker.ServiceClient) -> None:
    """More of them than the engine has places for, sampled at once."""
    model = trained(client, seed=5)
    samplers, expected = [client.create_sampling_client(base_model="tiny").result()], [scored(model)]
    for number in range(PLACES + 1):
        for _ in range(2):
            step(model, [supervised()])
        path = model.save_weights_for_sampler(f"at-{number}").result().path
        samplers.append(client.create_sampling_client(model_path=path).result())
        expected.append(scored(model))
    whole = types.ModelInput.from_ints(TEXT)
    for _ in range(2):
        asked = [sampler.compute_logprobs(whole) for sampler in samplers]
        for future, logprobs in zip(asked, expected, strict=True):
            np.testing.assert_allclose(future.result()[1:], logprobs, rtol=1e-3, atol=1e-3)
    drawn = [
        sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=2)).result().sequences[1] for sampler in samplers
    ]
    assert [one.sequence_id.rpartition("@")[2] for one in drawn] == ["base", "v2", "v4", "v6"]
    assert samplers[0].get_base_model() == "tiny"
    status, loaded = server.call("/headrace/state")
    assert status == 200 and len(loaded["adapters"]) <= PLACES


def test_a_sampler_keeps_its_weights_when_others_are_saved_under_their_name(
    server: Running, client: tinker.ServiceClient
) -> None:
    """The first ones expire meanwhile. In the engine they stay until their place is taken, and are then said to be gone."""
    model = trained(client, seed=8)
    whole = types.ModelInput.from_ints(TEXT)

    def saved(name: str) -> tuple[str, tinker.SamplingClient]:
        path = model.save_weights_for_sampler(name).result().path
        return path, client.create_sampling_client(model_path=path).result()

    path, first = saved("same")
    before = first.compute_logprobs(whole).result()
    shutil.rmtree(server.service.store.place(path))
    for _ in range(2):
        step(model, [supervised()])
    again, second = saved("same")
    assert again == path and second.compute_logprobs(whole).result() != before
    assert first.compute_logprobs(whole).result() == before
    for number in range(PLACES):
        saved(f"more-{number}")[1].compute_logprobs(whole).result()
    with pytest.raises(tinker.RequestFailedError, match="are not there any more"):
        first.compute_logprobs(whole).result()
    np.testing.assert_allclose(
        saved("last")[1].compute_logprobs(whole).result()[1:], scored(model), rtol=1e-3, atol=1e-3
    )


def test_inflight_samplers_share_the_newest_weights(client: tinker.ServiceClient) -> None:
    model = trained(client, seed=6)
    first = model.save_weights_and_get_sampling_client(kind="inflight").result()
    whole = types.ModelInput.from_ints(TEXT)
    before = first.compute_logprobs(whole).result()
    step(model, [supervised()])
    second = model.save_weights_and_get_sampling_client(kind="inflight").result()
    np.testing.assert_allclose(second.compute_logprobs(whole).result()[1:], scored(model), rtol=1e-3, atol=1e-3)
    assert first.compute_logprobs(whole).result() == second.compute_logprobs(whole).result() != before


def test_a_state_is_continued_by_another_client(server: Running, client: tinker.ServiceClient) -> None:
    model = trained(client, seed=7)
    for _ in range(3):
        step(model, [supervised()])
    path = model.save_state("third").result().path
    later = [step(model, [supervised()]) for _ in range(2)]
    with server.client() as other:
        same = other.create_training_client_from_state_with_optimizer(path).result()
        assert [step(same, [supervised()]) for _ in range(2)] == later
        assert same.get_info().lora_rank == 4
        fresh = other.create_training_client_from_state(path).result()
        first, second = (step(fresh, [supervised()]) for _ in range(2))
        assert first == later[0] and second != later[1]
        with pytest.raises(tinker.NotFoundError, match="never saved"):
            other.create_training_client_from_state(path.replace("third", "fourth")).result()
    with pytest.raises(tinker.RequestFailedError, match="is there already") as refused:
        model.save_state("third").result()
    assert refused.value.category == "user"
    model.save_state("third", ttl_seconds=7200, overwrite=True, user_metadata={"why": "again"}).result()
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    (found,) = rest.list_checkpoints(model.model_id).result().checkpoints
    assert (found.tinker_path, found.user_metadata) == (path, {"why": "again"})
    assert found.expires_at and (found.expires_at - found.time).total_seconds() == pytest.approx(7200, abs=60)
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    assert rest.get_server_capabilities().result().supported_models[0].model_name == "tiny"


def test_a_loss_of_the_clients_own_has_its_gradient(client: tinker.ServiceClient) -> None:
    one, two = trained(client, seed=8), trained(client, seed=8)
    datum = types.Datum(
        model_input=supervised().model_input,
        loss_fn_inputs={
            "target_tokens": TEXT[1:],
            "logprobs": [-3.0] * 11,
            "advantages": [0.5, -1.0] * 5 + [1.0],
        },
    )

    def mine(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        inputs = data[0].loss_fn_inputs
        ratio = (logprobs[0] - inputs["logprobs"].to_torch()).exp()
        return -(ratio * inputs["advantages"].to_torch()).sum(), {}

    for _ in range(2):
        passed, stepped = one.forward_backward_custom([datum], mine), one.optim_step(ADAM)
        stepped.result()
        assert passed.result().metrics["loss:sum"] == pytest.approx(step(two, [datum], "importance_sampling"), rel=1e-4)
    np.testing.assert_allclose(scored(one), scored(two), rtol=1e-3, atol=1e-3)


def test_what_is_not_served_is_refused_by_name_and_trains_nothing(client: tinker.ServiceClient) -> None:
    model = trained(client, seed=9)
    before = scored(model)
    image = types.ImageChunk(data=b"png", format="png")
    with_image = types.Datum(
        model_input=types.ModelInput(chunks=[image]), loss_fn_inputs={"target_tokens": [1], "weights": [1.0]}
    )
    short = types.Datum(model_input=PROMPT, loss_fn_inputs={"target_tokens": [1, 2], "weights": [1.0, 1.0]})
    extra = types.Datum(
        model_input=PROMPT, loss_fn_inputs={"target_tokens": [1, 2, 3], "weights": [1.0] * 3, "advantages": [1.0] * 3}
    )
    for data, loss, config, said in [
        (supervised(), "stable_reinforce", None, "the loss stable_reinforce is not served"),
        (supervised(), "custom", {"loss_id": "x"}, "the loss custom is not served"),
        (supervised(), "ppo", None, "has no logprobs"),
        (supervised(), "cross_entropy", {"beta": 1.0}, "loss_fn_config has beta"),
        (supervised(), "cross_entropy", {"how": "text"}, "numbers"),
        (with_image, "cross_entropy", None, "a chunk of image"),
        (short, "cross_entropy", None, "3 tokens and 2 target_tokens"),
        (extra, "cross_entropy", None, "has advantages, which cross_entropy does not read"),
    ]:
        passed, stepped = model.forward_backward([data], loss, config), model.optim_step(ADAM)
        with pytest.raises(tinker.BadRequestError, match=said):
            passed.result()
        with pytest.raises(tinker.RequestFailedError, match="a forward_backward before it failed") as refused:
            stepped.result()
        assert refused.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="has the token 4000 in model_input") as refused:
        model.forward([supervised([1, 4000, 2])], "cross_entropy").result()
    assert refused.value.category == "user"
    assert scored(model) == before
    step(model, [supervised()])
    for wrong, said in [
        ({"base_model": "gpt-7"}, "there is no model gpt-7 here; there is: tiny"),
        ({"rank": 300}, "a rank of 300 is above 256"),
        ({"rank": 40}, "lora.rank = 40 is above the 32 dimensions|16 dimensions"),
        ({"train_mlp": False, "train_attn": False}, "train_unembed alone is not served"),
        ({"optimizer": types.DimuonOptimizerConfig()}, "the optimizer dimuon is not served"),
    ]:
        with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match=said):
            client.create_lora_training_client(**{"base_model": "tiny", "rank": 2, **wrong}).result()
    sampler = client.create_sampling_client(base_model="tiny").result()
    with pytest.raises(tinker.BadRequestError, match="prompt_alt_tokens_k is not served"):
        sampler.sample(PROMPT, 1, greedy(), prompt_alt_tokens_k=2).result()
    with pytest.raises(tinker.BadRequestError, match="max_tokens = 500"):
        sampler.sample(PROMPT, 1, greedy(500)).result()


@pytest.mark.filterwarnings("ignore:DEPRECATED")
def test_a_refused_request_holds_nothing_up(client: tinker.ServiceClient) -> None:
    """It took no number, and everything behind it failed after five and a half minutes with all that the model had learned."""
    model = trained(client, seed=14)
    first = step(model, [supervised()])
    refusals = (tinker.APIStatusError, tinker.RequestFailedError)
    for wrong in (
        lambda: model.save_state("step 10"),
        lambda: model.save_state("../../evil"),
        lambda: model.load_state("tinker://nope:train:0/weights/x"),
        lambda: model.optim_step(types.AdamParams(learning_rate=float("nan"))),
        lambda: model.forward_backward([supervised()], "stable_reinforce"),
    ):
        with pytest.raises(refusals):
            wrong().result(30)
    with pytest.raises(tinker.RequestFailedError, match="a forward_backward before it failed"):
        model.optim_step(ADAM).result(30)
    assert step(model, [supervised()]) < first, "it goes on from what it has learned"
    assert model.save_state("step-10").result(30).path.endswith("step-10")


def test_options_of_sampling(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(max_tokens=6, seed=5, top_k=20, top_p=0.9, temperature=0.8)
    one, two = (sampler.sample(PROMPT, 2, params, topk_sample_logprobs=2).result() for _ in range(2))
    assert [s.tokens for s in one.sequences] == [s.tokens for s in two.sequences]
    assert one.sequences[0].tokens != one.sequences[1].tokens
    assert len({s.sequence_id for s in [*one.sequences, *two.sequences]}) == 4
    tops = one.sequences[0].topk_logprobs
    assert len(tops) == len(one.sequences[0].tokens) and all(len(top) == 2 and top[0][1] >= top[1][1] for top in tops)
    only = types.SamplingParams(max_tokens=2, seed=5, top_k=1)
    (few,) = sampler.sample(PROMPT, 1, only, topk_sample_logprobs=3).result().sequences
    assert [[token for token, _ in row] for row in few.topk_logprobs] == [[token] for token in few.tokens], (
        "no more are left"
    )
    token = sampler.sample(PROMPT, 1, greedy()).result().sequences[0].tokens[2]
    stopped = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[token])
    sequence = sampler.sample(PROMPT, 1, stopped).result().sequences[0]
    assert sequence.stop_reason == "stop" and sequence.tokens[-1] == token
    whole = types.ModelInput.from_ints(TEXT)
    scores = sampler.sample(whole, 1, greedy(1), include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    last = sampler.sample(
        whole, 1, greedy(1), include_prompt_logprobs=True, topk_prompt_logprobs=3, prompt_logprobs_last_n=4
    ).result()
    assert scores.topk_prompt_logprobs[0] is None and len(scores.topk_prompt_logprobs) == 12
    assert last.prompt_logprobs[:8] == [None] * 8 and last.topk_prompt_logprobs[:8] == [None] * 8
    np.testing.assert_allclose(last.prompt_logprobs[8:], scores.prompt_logprobs[8:], rtol=1e-4)
    assert [[i for i, _ in row] for row in last.topk_prompt_logprobs[8:]] == [
        [i for i, _ in row] for row in scores.topk_prompt_logprobs[8:]
    ]


def test_a_wrong_token_gets_nowhere(server: Running) -> None:
    with pytest.raises(tinker.AuthenticationError):
        server.client("tml-not-this-one-at-all").create_sampling_client(base_model="tiny")
    status, body = server.call("/api/v1/healthz", **{"X-API-Key": "tml-wrong"})
    assert status == 401 and "asks for a token" in body["error"]["message"]
    assert server.call("/api/v1/healthz")[0] == 200


def test_malformed_bodies(server: Running, client: tinker.ServiceClient) -> None:
    session = client.holder.get_session_id()
    model = trained(client, seed=10).model_id
    for path, body, status, said in [
        ("forward_backward", b"\xff\xff\xff", 400, "is no ForwardBackwardRequest"),
        ("forward_backward", {"model_id": model}, 415, "application/x-protobuf"),
        ("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"beta1": 2}}, 400, "beta1"),
        (
            "optim_step",
            {"model_id": "nobody:train:0", "seq_id": 1, "adam_params": {}},
            404,
            "there is no session nobody",
        ),
        ("optim_step", {"model_id": f"{session}:train:9", "seq_id": 1, "adam_params": {}}, 404, "there is no model"),
        ("save_weights", {"model_id": model, "seq_id": 1, "path": "../../etc"}, 400, "path"),
        ("weights_info", {"tinker_path": "tinker://../weights/x"}, 400, "is no path of weights"),
        ("weights_info", {"tinker_path": f"tinker://{model}/weights/x"}, 404, "never saved"),
        ("retrieve_future", {"request_id": "made up"}, 410, "there is no request made up"),
        ("create_model", {"session_id": session}, 400, "model_seq_id"),
        ("asample", {"prompt": {"chunks": []}, "sampling_params": {}, "base_model": "tiny"}, 400, "no tokens"),
        (
            "asample",
            {"prompt": {"chunks": []}, "sampling_params": {}, "sampling_session_id": f"{session}:sample:99"},
            404,
            "no sampler",
        ),
        ("copy_weights", {}, 404, "copy_weights is not served"),
        ("auth/token", {}, 404, "auth/token is not served"),
    ]:
        found, answer = server.call(f"/api/v1/{path}", body)
        assert found == status and said in answer["error"]["message"], (path, found, answer)


def test_a_request_that_is_sent_twice_is_done_once_and_its_result_can_be_fetched_again(
    server: Running, client: tinker.ServiceClient
) -> None:
    model = trained(client, seed=11)
    model.forward_backward([supervised()], "cross_entropy").result()
    body = {"model_id": model.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    first, again = (server.call("/api/v1/optim_step", body) for _ in range(2))
    assert first == again and first[0] == 200
    fetched = [server.call("/api/v1/retrieve_future", {"request_id": first[1]["request_id"]}) for _ in range(2)]
    assert fetched[0] == fetched[1] and fetched[0][1]["metrics"]["version"] == 1
    assert (
        server.call("/headrace/training")[1]["sessions"][client.holder.get_session_id()]["models"][model.model_id][
            "steps"
        ]
        == 1
    )


@pytest.mark.whole
def test_the_death_of_the_trainer_fails_what_it_had_and_the_next_one_goes_on(
    server: Running, client: tinker.ServiceClient
) -> None:
    model = trained(client, seed=12)
    step(model, [supervised()])
    path = model.save_state("before").result().path
    later = step(model, [supervised()])
    pid = server.service.trainer._keeper._worker.pid
    os.kill(pid, signal.SIGSTOP)  # so that both are pending when it dies
    pending = [model.forward_backward([supervised()], "cross_entropy"), model.optim_step(ADAM)]
    os.kill(pid, signal.SIGKILL)
    for future in pending:
        with pytest.raises(tinker.RequestFailedError, match="last save_state is lost") as failed:
            future.result(240)
        assert failed.value.category == "server"
    with pytest.raises(tinker.RequestFailedError, match="trainer"):
        model.forward([supervised()], "cross_entropy").result(60)
    again = client.create_training_client_from_state_with_optimizer(path).result(240)
    assert step(again, [supervised()]) == later
