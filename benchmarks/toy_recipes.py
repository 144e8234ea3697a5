"""Recipes on a toy task, with fresh and with stale tokens: does a loss learn, and what does lag cost it? (docs/algorithms.md, docs/choosing.md)

A random model of two layers, whose reward is the share of one letter; a run of 20 steps takes some ten seconds of one core. With `--turns`, rollouts have
several turns: a reply with this letter goes one place further, and the reward is the share of the way. With `--gym`, prompts and rewards are those of a family of
reasoning_gym (`pip install "headrace[tasks]"`), which gives an answer that holds the right one the share of its length.

    python benchmarks/toy_recipes.py grpo ce_gppo vespo --lags 1 4 --seeds 0 1
    python benchmarks/toy_recipes.py grpo dapo gspo tis --lags 0 1 4 --seeds 0 1 2 --steps 40 --errors
    python benchmarks/toy_recipes.py grpo gigpo --turns 4 --lags 1
    python benchmarks/toy_recipes.py grpo tis --prompts 12 --algo experience.rollouts=2 --lags 1 --seeds 0 1 2
    python benchmarks/toy_recipes.py grpo tis cispo --gym letter_counting --lags 0 4 --seeds 0 1 --steps 40 --errors
    python benchmarks/toy_recipes.py prime rloo --rank 8 --lags 1 --seeds 0 1 2 --steps 20 --errors
    python benchmarks/toy_recipes.py ppo --critic 1e-3 --lags 1 --seeds 0 1 --steps 40 --errors
    python benchmarks/toy_recipes.py grpo --algo kl.coef=0.3 kl.every=10 --lags 1 --seeds 0 1 --steps 40
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

import headrace
from headrace.algo.config import AlgoConfig
from headrace.facts.facts import GroupEnded, WarmStarted
from headrace.facts.records import StepRow, read_metrics
from headrace.settings.toml import parse_sets

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from conftest import CHARACTERS, SPECIAL, save_tokenizer

from support.tiny_run import tiny_config

WALK = """
async def play(agent, prompt, **columns):
    place = 0
    for turn in range(TURNS):
        agent.state(f"place {place}")
        reply = await agent.chat(f"{place}" if turn else prompt)
        place += "e" in reply.text
    return place / TURNS
"""
GYM = {"letter_counting": {"min_words": 2, "max_words": 3}, "gcd": {"max_value": 9}, "count_bits": {"max_n": 30}}
"""Families of reasoning_gym whose answers are mostly one digit, which a random model finds by chance, and their settings."""
GAMES = {"GuessTheNumber-v0": {"max_number": 9, "max_turns": 4, "unfinished": 0.0}}
"""Games of textarena whose moves are one token, and their options."""
READ = r"[0-9]|(?<= is )[hl]"
"""What a model reads of a game's words, a character a token: digits, and whether the number is higher or lower. All of them would be 700 tokens."""
ANSWER = "eeeee"
"""The given answer to every prompt, for recipes that learn from such: as many of them in a step as there are groups."""
TWICE = """
def twice(prompts, completions, **columns):
    return [float(text.count("e") > 1) for text in completions]
"""
"""A reward that a random model gets in about one of forty rollouts, so that most groups have no contrast."""
ENDS = 4
"""Steps at the beginning and at the end of a run whose mean reward is given."""


class ToyRun(NamedTuple):
    rewards: list[float]
    """Mean reward of each step."""
    stopped: float
    """Share of the loss tokens without a gradient of the policy loss: beyond a bound of the ratio, or masked by a rule."""
    norms: list[float]
    """Norm of the gradient of each step."""
    drawn: int
    """Groups that were sampled; those without contrast are not trained."""
    explained: list[float]
    """The share of the returns' variance that a critic explained in each step; empty without one."""
    divergences: list[float]
    """Mean divergence of a token from the reference in each step; zeros without one."""
    held_out: list[float]
    """The loss of held-out answers before each epoch of a warm start, and after the last; empty without one."""


def make_model(directory: Path, read: str = "", head: float = 1.0) -> Path:
    """`read`: a pattern; of a message's text its matches are the tokens, and nothing else is read. `head`: the factor of the output head, which adapters leave as it is: that of a
    random model can give no token much."""
    directory.mkdir()
    save_tokenizer(directory)
    if read:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(read), "removed", invert=True)
        tokenizer.save(str(directory / "tokenizer.json"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= head
    model.save_pretrained(directory)
    return directory


def trained(
    place: Path,
    model: Path,
    recipe: str,
    *,
    lag: int,
    seed: int,
    steps: int,
    turns: int = 1,
    prompts: int = 0,
    gym: str = "",
    game: str = "",
    sparse: bool = False,
    rank: int = 0,
    critic: float = 0.0,
    warm_start: int = 0,
    algo: Mapping[str, Any] = {},
) -> ToyRun:
    """`warm_start`: epochs of learning the given answer first. `algo`: settings of `[algo]` beside the recipe's name."""
    place.mkdir()
    (place / "twice.py").write_text(TWICE)
    (place / "walk.py").write_text(WALK.replace("TURNS", str(turns)))
    walks = {
        "reward": {"function": ""},
        "environment": {"function": f"{place / 'walk.py'}:play", "workers": 1, "max_turns": turns},
    }
    settings = tiny_config(
        place,
        model,
        seed=seed,
        algo={"name": recipe, **algo},
        train={"steps": steps, "learning_rate": 3e-3},
        staleness={"max_lag": lag},
        checkpoint={"every": 0},
        **(walks if turns > 1 else {}),
    )
    if critic:
        settings["algo"]["critic"] = {"model": str(model), "model_learning_rate": critic}
    if rank:
        settings["lora"], settings["train"]["learning_rate"] = {"rank": rank}, 1e-2
    for worker in ("engine", "train"):
        settings[worker]["threads"] = 1  # of products this small, more would wait for one another
    if sparse:
        settings["reward"] = {"function": f"{place / 'twice.py'}:twice"}
    if gym:
        settings["task"] = {"kind": "reasoning_gym", "name": gym, "options": GYM[gym], "held_out": 16}
        settings["reward"] = {"function": "reasoning_gym"}
        settings["engine"]["context_length"] = 256
    if game:
        settings["task"] = {"kind": "seeds", "held_out": 16}
        settings["reward"] = {"function": ""}
        game_of = {"kind": "textarena", "name": game, "options": GAMES[game]}
        settings["environment"] = {**game_of, "workers": 1, "max_turns": 6}
        if AlgoConfig(recipe).with_length(1) != AlgoConfig(recipe):
            settings["algo"]["length_constant"] = 6
        settings["rollout"]["max_tokens"] = 1
    kind = AlgoConfig(recipe).given_answers
    if kind != "none" or warm_start:
        asked = map(json.loads, (place / "rows.jsonl").read_text().splitlines())
        given = [json.dumps({"prompt": row["prompt"], "answer": ANSWER}) for row in asked]
        (place / "answers.jsonl").write_text("\n".join(given))
    if kind != "none":
        own = {} if kind == "compared" else {"rows_per_step": settings["staleness"]["groups_per_step"]}
        settings["demonstrations"] = {"path": str(place / "answers.jsonl"), **own}
    if warm_start:
        settings["warm_start"] = {"path": str(place / "answers.jsonl"), "epochs": warm_start, "learning_rate": 3e-4}
    if prompts:
        rows = (place / "rows.jsonl").read_text().splitlines()
        (place / "rows.jsonl").write_text("\n".join(rows[: prompts + 16]))  # 16 are held out
    with redirect_stdout(sys.stderr):  # the summary of the run
        run = headrace.train(settings).directory
    facts = read_metrics(run)
    rows = [fact for fact in facts if isinstance(fact, StepRow)]
    drawn = sum(isinstance(fact, GroupEnded) for fact in facts)
    tokens = sum(row.report.loss_tokens for row in rows)
    stopped = sum(lag.tokens * (lag.clipped + sum(lag.masked.values())) for row in rows for lag in row.report.lags)
    explained = [row.report.critic.explained_variance for row in rows if row.report.critic]
    norms = [row.report.grad_norm for row in rows]
    divergences = [row.report.reference_kl for row in rows]
    held_out = next((fact.held_out for fact in facts if isinstance(fact, WarmStarted)), [])
    rewards = [row.reward_drawn for row in rows]
    return ToyRun(rewards, stopped / tokens, norms, drawn, explained, divergences, list(held_out))


def cell(runs: Sequence[ToyRun], errors: bool) -> str:
    """The mean reward of the last steps: of each seed, or the mean with its standard error, the spread from step to step and what was stopped."""
    last = [fmean(run.rewards[-ENDS:]) for run in runs]
    if not errors:
        return ", ".join(f"{value:.3f} of {run.drawn} groups" for value, run in zip(last, runs, strict=True))
    error = stdev(last) / len(last) ** 0.5
    spread = fmean(stdev(run.norms[len(run.norms) // 2 :]) / fmean(run.norms[len(run.norms) // 2 :]) for run in runs)
    return f"{fmean(last):.3f} ± {error:.3f}; {spread:.2f}; {100 * fmean(run.stopped for run in runs):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=1, help="turns of a rollout")
    parser.add_argument(
        "--prompts", type=int, default=0, help="different prompts, which come again and again; 0: more than a run draws"
    )
    parser.add_argument("--gym", choices=[*GYM], default="", help="a family of reasoning_gym instead of the toy task")
    parser.add_argument("--rank", type=int, default=0, help="train an adapter of this rank")
    parser.add_argument(
        "--critic",
        type=float,
        default=0.0,
        help="learning rate of a critic with a model of its own, at first the policy's",
    )
    parser.add_argument(
        "--algo",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings of [algo], such as kl.coef=0.1 kl.every=10",
    )
    parser.add_argument("--warm-start", type=int, default=0, metavar="EPOCHS", help="learn the given answer first")
    parser.add_argument("--sparse", action="store_true", help="a reward of 1 for two letters or more, else 0")
    parser.add_argument("--errors", action="store_true", help="means with standard errors, of two seeds or more")
    told = parser.parse_args()
    algo = parse_sets(told.algo)
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model", head=8.0 if told.rank else 1.0)
        print("| `algo.name` | " + " | ".join(f"`max_lag` {lag}" for lag in told.lags) + " |")
        print("|---" * (1 + len(told.lags)) + "|")
        for recipe in told.recipes:
            cells = []
            for lag in told.lags:
                runs = [
                    trained(
                        Path(name) / f"{recipe}-{lag}-{seed}",
                        model,
                        recipe,
                        lag=lag,
                        seed=seed,
                        steps=told.steps,
                        turns=told.turns,
                        prompts=told.prompts,
                        gym=told.gym,
                        sparse=told.sparse,
                        rank=told.rank,
                        critic=told.critic,
                        warm_start=told.warm_start,
                        algo=algo,
                    )
                    for seed in told.seeds
                ]
                cells.append(cell(runs, told.errors))
                begun = ", ".join(f"{fmean(run.rewards[:ENDS]):.3f}" for run in runs)
                values = ", ".join(
                    f"{fmean(run.explained[len(run.explained) // 2 :]):.2f}" for run in runs if run.explained
                )
                more = f"; explained by values in the second half {values}" if values else ""
                if told.warm_start:
                    losses = "; ".join(", ".join(f"{loss:.2f}" for loss in run.held_out) for run in runs)
                    more += f"; held-out loss of the warm start {losses}"
                if any(run.divergences[-1] for run in runs):
                    apart = [[fmean(run.divergences[at : at + 10]) for at in range(0, told.steps, 10)] for run in runs]
                    more += "; divergence of each ten steps " + "; ".join(
                        ", ".join(f"{value:.4f}" for value in one) for one in apart
                    )
                print(
                    f"{recipe}, max_lag {lag}: {cells[-1]} (first {ENDS} steps {begun}{more})",
                    file=sys.stderr,
                    flush=True,
                )
            print(f"| `{recipe}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
