"""Whole runs that learn from teachers, with real processes on tiny models."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace
from headrace.commands.replay.replay import replay
from headrace.core.batches import Group
from headrace.core.errors import ConfigError, WorkerDied
from headrace.durable.journal import read_steps
from headrace.facts.facts import Evaluated, RunEnded, WorkerLost
from headrace.facts.records import StepRow
from headrace.models.chat import ChatEncoder
from support.runs.beside import until
from support.tiny_run import Config, of, tiny_config, until_noted, when_step


@pytest.fixture(scope="session")
def other_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture and tokenizer with other weights, large enough that it is sure of what it says."""
    from transformers import AutoConfig, LlamaForCausalLM

    torch.manual_seed(1)
    directory = tmp_path_factory.mktemp("other-llama")
    model = LlamaForCausalLM(AutoConfig.from_pretrained(tiny_llama))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_llama / name, directory / name)
    return directory


@pytest.fixture
def config(tiny_llama: Path, tmp_path: Path) -> Config:
    config = tiny_config(
        tmp_path, tiny_llama, name="taught", algo={"name": "opd"}, rollout={"group_size": 2}, train={"steps": 4}
    )
    rows = [{"prompt": f"{i} + {i}?", "kind": "even" if i % 2 == 0 else "odd"} for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    del config["reward"]
    return config


def groups_of(directory: Path) -> list[Group]:
    return [group for entry in read_steps(directory) for group in entry.groups]


def said_by(model_dir: Path) -> Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]:
    """[T, V] log-probs of a completion's positions, computed by Hugging Face from the files."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()

    @torch.no_grad()
    def score(context: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
        logits = model(torch.tensor([[*context, *tokens]])).logits[0]
        return logits.log_softmax(-1)[len(context) - 1 : -1]

    return score


def writers_of(log: Path) -> list[int]:
    """The processes that write it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile
            if Path(os.readlink(entry / "fd" / "1")) == log:
                found.append(int(entry.name))
    return found


def kill_the_teacher(run: Path) -> None:
    """As soon as there is one."""
    log = run / "logs" / "teacher-north.log"
    until(lambda: writers_of(log))
    os.kill(writers_of(log)[0], signal.SIGKILL)


@pytest.mark.slow
def test_a_run_without_any_reward_learns_from_a_teacher_that_is_killed_on_the_way(
    config: Config, other_llama: Path, tmp_path: Path
) -> None:
    config["teachers"] = [{"name": "north", "path": str(other_llama)}]
    config["train"]["steps"] = 100_000
    config["rollout"]["group_size"] = 8
    directory = tmp_path / "runs" / "taught"

    def enough(step: headrace.Step) -> None:
        if step.step >= 15 and of(directory, WorkerLost):
            raise headrace.StopTraining("its teacher was killed, and it has learned")

    kill = when_step(directory, 5, lambda: kill_the_teacher(directory))
    assert headrace.train(config, on_step=enough).step >= 15
    kill.join()
    lost = of(directory, WorkerLost)
    assert [(one.who, one.deaths) for one in lost] == [("teacher north", 1)]
    ended = of(directory, RunEnded)[-1]
    assert ended.accounting.balance() == 0 and not ended.accounting.failed, "no rollout was lost with the process"
    gaps = [row.report.teacher_kl for row in of(directory, StepRow)]
    assert np.mean(gaps[-5:]) < 0.9 * np.mean(gaps[:3]), f"the policy did not come nearer to its teacher: {gaps}"
    exact = said_by(other_llama)
    for group in groups_of(directory)[:4]:
        for rollout, row in zip(group.scored, group.rows, strict=True):
            turn = rollout.episode.turns[0]
            wanted = exact(turn.context, turn.completion.tokens)
            wanted = wanted.gather(1, torch.tensor(turn.completion.tokens)[:, None])[:, 0]
            assert rollout.teachers[0].logprobs == pytest.approx(wanted.tolist(), abs=1e-4)
            assert rollout.rewards == {} and row.teacher == rollout.teachers[0]
            assert set(rollout.teachers[0].versions) == {0}


@pytest.mark.slow
def test_a_teacher_that_keeps_dying_stops_the_run_with_a_checkpoint(
    config: Config, other_llama: Path, tmp_path: Path
) -> None:
    config["teachers"] = [{"name": "north", "path": str(other_llama), "engine": {"max_deaths": 1}}]
    config["train"]["steps"] = 100_000

    def kill_twice() -> None:
        kill_the_teacher(directory)
        until_noted(directory, WorkerLost)
        kill_the_teacher(directory)

    directory = tmp_path / "runs" / "taught"
    kill = when_step(directory, 2, kill_twice)
    with pytest.raises(WorkerDied, match=r"the teacher north process .* its death no\. 2"):
        headrace.train(config)
    kill.join()
    ended = of(directory, RunEnded)[-1]
    assert ended.accounting.balance() == 0 and ended.step >= 2
    assert (directory / "checkpoints" / f"step-{ended.step:06d}").is_dir(), "what was learned until then is not lost"


def test_teachers_are_routed_by_row_and_compared_by_their_most_probable_tokens(
    config: Config, tiny_llama: Path, other_llama: Path, tmp_path: Path
) -> None:
    config["algo"] = {"name": "opd_topk", "distill": {"k": 5}}
    config["teachers"] = [
        {"name": "evens", "path": str(other_llama), "route": {"column": "kind", "values": ["even"]}},
        {"name": "odds", "path": str(tiny_llama), "route": {"column": "kind", "values": ["odd"]}},
    ]
    headrace.train(config)
    exact = {"evens": said_by(other_llama), "odds": said_by(tiny_llama)}
    names = set()
    for group in groups_of(tmp_path / "runs" / "taught"):
        for rollout in group.scored:
            turn, trace = rollout.episode.turns[0], rollout.teachers[0]
            names.add(trace.name)
            assert trace.name == {"even": "evens", "odd": "odds"}[group.prompt.columns["kind"]]
            assert trace.top is not None and trace.top.k == 5
            wanted = exact[trace.name](turn.context, turn.completion.tokens).topk(5)
            logprobs = np.frombuffer(trace.top.logprobs, np.float32).reshape(-1, 5)
            assert logprobs == pytest.approx(wanted.values.numpy(), abs=1e-4)
    assert names == {"evens", "odds"}


SOLVED = "{prompt}\n\nA solution: {kind}"


def with_solution(encoder: ChatEncoder, group: Group) -> tuple[int, ...]:
    """What a teacher with that prompt reads before the completions of a group."""
    words = f"{group.prompt.text}\n\nA solution: {group.prompt.columns['kind']}"
    return encoder.encode_messages([{"role": "user", "content": words}])[1]


@pytest.mark.slow
def test_a_student_is_taught_by_itself_with_solutions_that_it_never_reads(
    config: Config, tiny_llama: Path, tmp_path: Path
) -> None:
    config["algo"] = {"name": "opsd", "distill": {"k": 5}}
    config["teachers"] = [{"name": "self", "path": str(tiny_llama), "prompt": SOLVED}]
    config["train"]["steps"] = 2
    headrace.train(config)
    directory = tmp_path / "runs" / "taught"
    encoder, exact, moved = ChatEncoder(tiny_llama), said_by(tiny_llama), 0.0
    for group in groups_of(directory):
        own = encoder.encode_messages([{"role": "user", "content": group.prompt.text}])[1]
        shown = with_solution(encoder, group)
        for rollout, row in zip(group.scored, group.rows, strict=True):
            turn, trace = rollout.episode.turns[0], rollout.teachers[0]
            assert row.prompt == turn.context == own, "the policy reads the question alone"
            assert row.tokens == turn.completion.tokens and row.teacher == trace
            ids = torch.tensor(turn.completion.tokens)[:, None]
            wanted = exact(shown, turn.completion.tokens)
            assert trace.logprobs == pytest.approx(wanted.gather(1, ids)[:, 0].tolist(), abs=1e-4)
            assert trace.top is not None
            tops = np.frombuffer(trace.top.logprobs, np.float32).reshape(-1, 5)
            assert tops == pytest.approx(wanted.topk(5).values.numpy(), abs=1e-4)
            plain = exact(own, turn.completion.tokens).gather(1, ids)[:, 0]
            moved = max(moved, float((plain - torch.tensor(trace.logprobs)).abs().max()))
    assert moved > 1e-3, "what the teacher is shown changes none of its numbers: the test shows nothing"
    assert replay(directory, 1, 2) == 0, "bit for bit"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_in_the_reward_is_the_initial_model_and_its_kl_is_taken_off(
    rank: int, config: Config, tiny_llama: Path, tmp_path: Path
) -> None:
    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        return [text.count("e") / 8 for text in completions]

    config["lora"] = {"rank": rank}
    config["algo"] = {"name": "rloo", "kl": {"coef": 0.5, "estimator": "k1", "place": "reward"}}
    config["rollout"]["group_size"] = 4
    headrace.train(config, reward=reward)
    directory = tmp_path / "runs" / "taught"
    headrace.train({**config, "train": {**config["train"], "steps": 6}}, reward=reward, resume=directory)
    own = (directory / "logs" / "reference.log").exists()
    assert own == (rank == 0), "with LoRA the run's own engine serves the base already"
    exact, moved = said_by(tiny_llama), 0.0
    for group in groups_of(directory):
        shaped = []
        for rollout in group.scored:
            turn = rollout.episode.turns[0]
            tokens = torch.tensor(turn.completion.tokens)
            wanted = exact(turn.context, turn.completion.tokens).gather(1, tokens[:, None])[:, 0]
            assert rollout.references[0] == pytest.approx(wanted.tolist(), abs=1e-4)
            gap = sum(turn.completion.logprobs) - float(wanted.sum())  # k1, summed over the rollout
            moved = max(moved, abs(gap))
            shaped.append(rollout.reward - 0.5 * gap)
        for i, row in enumerate(group.rows):  # leave-one-out
            others = [value for j, value in enumerate(shaped) if j != i]
            assert row.advantages[0] == pytest.approx(shaped[i] - sum(others) / len(others), abs=1e-3)
    assert moved > 0.1, "the policy never left the reference: the test shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["", SOLVED])
def test_the_student_of_some_steps_ago_teaches_itself_also_after_a_resume(
    prompt: str, config: Config, tiny_llama: Path, tmp_path: Path
) -> None:
    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        return [text.count("e") / 8 for text in completions]

    config["algo"] = {"name": "opd", "advantage": "centred"}
    config["teachers"] = [{"name": "past", "student": "snapshot", "every": 3, "prompt": prompt}]
    config["train"]["steps"] = 5
    config["checkpoint"] = {"every": 1, "keep": 10}
    headrace.train(config, reward=reward)
    directory = tmp_path / "runs" / "taught"
    assert (directory / "checkpoints" / "step-000005" / "shadow.safetensors").exists()
    headrace.train({**config, "train": {**config["train"], "steps": 8}}, reward=reward, resume=directory)
    students = {0: said_by(tiny_llama)}
    for version in (3, 6):
        students[version] = student_at(directory / "checkpoints" / f"step-{version:06d}", tiny_llama, tmp_path)
    seen, encoder = set(), ChatEncoder(tiny_llama)
    for entry in read_steps(directory):
        for group in entry.groups:
            front = with_solution(encoder, group) if prompt else group.prompt.tokens
            for rollout in group.scored:
                turn, trace = rollout.episode.turns[0], rollout.teachers[0]
                (version,) = set(trace.versions)
                assert version % 3 == 0 and version <= entry.step
                assert entry.step - version <= 3 + 2, "older than a snapshot's period and the lag of the rollout"
                seen.add(version)
                tokens = torch.tensor(turn.completion.tokens)
                wanted = students[version](front, turn.completion.tokens).gather(1, tokens[:, None])[:, 0]
                assert trace.logprobs == pytest.approx(wanted.tolist(), abs=1e-3)
    assert seen == {0, 3, 6}


def student_at(checkpoint: Path, model_dir: Path, tmp_path: Path) -> Callable[..., torch.Tensor]:
    """The student as a checkpoint holds it."""
    directory = tmp_path / checkpoint.name
    shutil.copytree(model_dir, directory)
    shutil.copyfile(checkpoint / "model.safetensors", directory / "model.safetensors")
    return said_by(directory)


@pytest.mark.slow
def test_a_teacher_of_another_vocabulary_is_refused_by_token_and_a_reward_by_text(
    config: Config, other_llama: Path, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger"
    shutil.copytree(other_llama, stranger)
    said = json.loads((stranger / "tokenizer.json").read_text())
    vocabulary = said["model"]["vocab"]
    vocabulary["e"], vocabulary["f"] = vocabulary["f"], vocabulary["e"]
    (stranger / "tokenizer.json").write_text(json.dumps(said))
    config["teachers"] = [{"name": "north", "path": str(stranger)}]
    with pytest.raises(ConfigError, match=r"2 of \d+ ids differ, .*set mode = \"text\" in its table"):
        headrace.train(config)
    config |= {"name": "by-text", "algo": {"name": "grpo"}, "eval": {"prompts": 4, "samples": 1}}
    config["teachers"] = [{"name": "critic", "path": str(stranger), "mode": "text", "weight": 2.0}]
    headrace.train(config)
    directory = tmp_path / "runs" / "by-text"
    exact = said_by(stranger)
    encoder = ChatEncoder(stranger)
    for group in groups_of(directory):
        _, front = encoder.encode_messages([{"role": "user", "content": group.prompt.text}])
        for rollout in group.scored:
            done = rollout.episode.last
            ended = done.stop == "stop"
            behind = (*encoder.encode_completion(done.text, False), *((2,) if ended else ()))
            total = float(exact(front, behind).gather(1, torch.tensor(behind)[:, None]).sum())
            assert rollout.rewards == {"critic": pytest.approx(total / (len(done.text) + ended), abs=1e-4)}
            assert rollout.reward == 2 * rollout.rewards["critic"]
    evaluated = of(directory, Evaluated)
    again = headrace.evaluate(config, run=directory, prompts=4)
    assert again.reward_mean == pytest.approx(evaluated[-1].reward_mean, abs=1e-4), "eval asks the critic too"
    assert all(math.isfinite(one.reward_mean) and one.reward_mean < 0 for one in evaluated)


def test_what_can_be_known_is_refused_before_anything_starts(config: Config, other_llama: Path, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    config["teachers"] = [{"name": "north", "path": absent}]
    with pytest.raises(
        ConfigError, match=rf"the teacher north: path = {absent} is not a directory.*headrace export RUN --to"
    ):
        headrace.train(config)
    config["name"] = "routed"
    config["teachers"] = [{"name": "n", "path": str(other_llama), "route": {"column": "kind", "values": ["even"]}}]
    with pytest.raises(ConfigError, match=r"no teacher takes row 2 of .*rows.jsonl \(kind = 'odd'\)"):
        headrace.train(config)
    with pytest.raises(ConfigError, match=r"no teacher takes row 1 of dataset= \(kind = None\)"):
        headrace.train({**config, "name": "passed"}, dataset=[{"prompt": f"{i}?"} for i in range(40)])
    config |= {"name": "unmeasured", "eval": {"prompts": 4}, "teachers": [{"name": "n", "path": str(other_llama)}]}
    with pytest.raises(ConfigError, match=r"eval.prompts = 4 measures a reward, and nothing gives one"):
        headrace.train(config)


@pytest.mark.slow
def test_a_part_of_a_real_model_learns_from_the_whole(tmp_path: Path) -> None:
    """SmolLM2 teaches a copy of itself that lacks every fifth layer."""
    from transformers import AutoModelForCausalLM

    from headrace.models.resolve import resolve_model

    whole, part = resolve_model("smollm2-135m-instruct"), tmp_path / "part"
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    kept = [layer for number, layer in enumerate(model.model.layers) if number % 5 != 3]
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(model.model.layers)
    model.config.layer_types = None
    model.save_pretrained(part)
    for path in whole.glob("*"):
        if path.name.startswith(("tokenizer", "chat_template", "special", "vocab", "merges")):
            shutil.copy(path, part / path.name)
    result = headrace.train(
        {
            "name": "part",
            "out": str(tmp_path / "runs"),
            "model": {"path": str(part)},
            "task": {"kind": "reasoning_gym", "name": "chain_sum"},
            "algo": {"name": "opd"},
            "teachers": [{"name": "whole", "path": str(whole)}],
            "rollout": {"group_size": 2, "max_tokens": 24},
            "train": {"steps": 8, "learning_rate": 1e-4, "dtype": "float32"},
            "engine": {
                "dtype": "float32",
                "kv_gib": 0.25,
                "context_length": 128,
            },  # its activations are too wild for less
            "staleness": {"groups_per_step": 8, "max_lag": 1},
            "eval": {"prompts": 0},
            "observe": {"terminal": "off"},
        }
    )
    gaps = [row.report.teacher_kl for row in of(result.directory, StepRow)]
    assert gaps[0] > 0 and np.mean(gaps[-2:]) < 0.8 * gaps[0], gaps
