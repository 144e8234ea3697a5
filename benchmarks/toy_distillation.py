"""How near does a small student come to its teacher, by each objective of distillation? (docs/distillation.md)

The teacher is the toy model of `toy_recipes.py` after `grpo` on its reward, the share of one letter; the student a random model of half its width and one layer.
Both are read by transformers afterwards, apart from headrace: the exact KL(student ‖ teacher) of each token that the student samples at temperature 1.

    python benchmarks/toy_distillation.py --seeds 0 1 2 --steps 30
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import headrace
from headrace.facts.records import StepRow, read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from conftest import CHARACTERS, SPECIAL, save_tokenizer

from support.tiny_run import tiny_config

FILTERED = {"temperature": 0.7, "top_p": 0.9}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "`opd`": ({"name": "opd"}, {}),
    "`opd_student_topk`, k = 4": ({"name": "opd_student_topk", "distill": {"k": 4}}, {}),
    "`gkd`": ({"name": "gkd"}, {}),
    "`gkd`, reverse": ({"name": "gkd", "distill": {"kind": "reverse"}}, {}),
    "`gkd`, reverse, sampled at 0.7 with top_p 0.9": ({"name": "gkd", "distill": {"kind": "reverse"}}, FILTERED),
}
"""Settings of the algorithm, and of sampling."""
LENGTH = 8


def make_model(directory: Path, layers: int, width: int, seed: int) -> Path:
    directory.mkdir()
    save_tokenizer(directory)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def trained(place: Path, model: Path, algo: dict[str, Any], *, seed: int, steps: int, **tables: Any) -> Path:
    """Returns the directory of the run."""
    place.mkdir()
    settings = tiny_config(place, model, seed=seed, algo=algo, **tables)
    settings["train"] |= {"steps": steps, "learning_rate": 3e-3, "threads": 1}
    settings["engine"]["threads"] = 1
    settings["checkpoint"] = {"every": steps}
    with redirect_stdout(sys.stderr):  # the summary of the run
        return headrace.train(settings).directory


def exported(run: Path, to: Path) -> Path:
    command = [sys.executable, "-m", "headrace", "export", str(run), "--to", str(to), "--dtype", "float32"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return to


@torch.no_grad()
def measured(student: Path, teacher: Path) -> tuple[float, float]:
    """(the mean of KL(student ‖ teacher) over the tokens that the student samples, in nats; the share of the letter)."""
    own, other = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in (student, teacher))
    tokenizer = AutoTokenizer.from_pretrained(student)
    ids = tokenizer([f"{number} + {number}?" for number in range(10, 74)], return_tensors="pt").input_ids
    torch.manual_seed(0)
    out = own.generate(ids, do_sample=True, top_k=0, max_new_tokens=LENGTH, pad_token_id=0)
    p, q = (model(out).logits[:, ids.shape[1] - 1 : -1].log_softmax(-1) for model in (own, other))
    sampled = out[:, ids.shape[1] :]
    there = sampled != 0
    text = "".join(tokenizer.batch_decode(sampled, skip_special_tokens=True))
    return float((p.exp() * (p - q)).sum(-1)[there].mean()), text.count("e") / max(len(text), 1)


def spread(values: list[float]) -> str:
    return f"{fmean(values):.3f} ± {stdev(values) / len(values) ** 0.5:.3f}" if values[1:] else f"{values[0]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--ways", type=int, nargs="+", default=[*range(len(WAYS))], help="numbers of objectives, from 0 on"
    )
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        first = make_model(here / "first", 2, 64, seed=0)
        teacher = exported(trained(here / "grpo", first, {"name": "grpo"}, seed=0, steps=told.steps), here / "teacher")
        student = make_model(here / "student", 1, 32, seed=1)
        print(
            "| objective | KL(student ‖ teacher), nats a token | share of the letter | its own loss, first and last 4 steps |"
        )
        print("|---|---|---|---|")
        before, taught = measured(student, teacher), measured(teacher, teacher)
        print(f"| before | {before[0]:.3f} | {before[1]:.3f} (the teacher's {taught[1]:.3f}) | |", flush=True)
        for number in told.ways:
            way, (algo, rollout) = [*WAYS.items()][number]
            algo = {**algo, "distill": {**algo.get("distill", {}), "model": str(teacher)}}
            found, curves = [], []
            for seed in told.seeds:
                place = here / f"{number}-{seed}"
                run = trained(
                    place,
                    student,
                    algo,
                    seed=seed,
                    steps=told.steps,
                    rollout={"group_size": 4, "max_tokens": LENGTH, **rollout},
                )
                found.append(measured(exported(run, place / "student"), teacher))
                rows = [fact.report for fact in read_metrics(run) if isinstance(fact, StepRow)]
                curves.append([row.divergence or row.teacher_kl for row in rows])
            ends = (fmean(fmean(curve[part]) for curve in curves) for part in (slice(4), slice(-4, None)))
            cells = [spread([one[column] for one in found]) for column in range(2)]
            print(f"| {way} | {' | '.join(cells)} | {' → '.join(f'{value:.3f}' for value in ends)} |", flush=True)


if __name__ == "__main__":
    main()
