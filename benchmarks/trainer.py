"""How fast is one optimizer step, compared with TRL's `GRPOTrainer` on the same rollouts?

    make bench-trl-setup            once
    make bench-trainer ARGS="--scale 4x4"      or      python benchmarks/trainer.py [--scale 16x16] [--only headrace,trl]

P prompts of 180 to 220 tokens × G completions of log-normal length, 50 to 400 tokens, sampled once by
SmolLM2-135M-Instruct itself with their log-probs; with --row-tokens (and one step, a row at a time, for TRL's memory:
--trl-rows 1) rows of one length, a prompt of 200 tokens included, of real text. Every contender is a process of its own, one after the other on the
same cores: it loads the model, warms up on a part, and is timed over whole optimizer steps: forward, backward,
clipping, AdamW. A trained token is one in the loss. Memory is the largest resident size of the process during the step.

Before that, the gradients of both sides are compared on a small batch in float32: the same loss (PPO clip, mean over
the step's tokens) on the same rows must give the same gradient, or the comparison means nothing. After it, headrace's
memory is measured by length.

Results are kept in a JSON file and not measured again unless --again is given: an interrupted run continues.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from trainer_process import ROOT, TRL, Child, Json, Results, machine

from headrace.models.resolve import resolve_model
from headrace.processes.launch.local import environment

SMALL = {"prompts": 2, "samples": 4}
TOLERANCE = 1e-4
"""Relative error of float32 gradients that rounding may cause."""
LENGTHS = (1024, 4096, 16384)

CONTENDERS: dict[str, Json] = {
    "headrace bf16": {"dtype": "bfloat16"},
    "headrace fp32": {"dtype": "float32"},
    "headrace bf16, unpacked": {"dtype": "bfloat16", "unpacked": True},
    "trl bf16": {"dtype": "bfloat16"},
    "trl bf16, checkpointing (its defaults)": {"dtype": "bfloat16", "checkpointing": True},
    "trl fp32": {"dtype": "float32"},
}


class Bench:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.folder: Path = given.folder / (f"{given.scale}-{given.row_tokens}" if given.row_tokens else given.scale)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results = Results(self.folder / "results.json", given.again)
        self.prompts, self.samples = (int(number) for number in given.scale.split("x"))
        self.model = resolve_model(given.model)
        self._variables = environment(sorted(os.sched_getaffinity(0)))

    def child(self, name: str, **options: object) -> Child:
        ours = name.startswith("headrace")
        return Child(
            "".join(letter if letter.isalnum() else "-" for letter in name),
            "trainer_headrace.py" if ours else "trainer_trl.py",
            {"model": str(self.model), **options},
            **({} if ours else {"python": str(TRL)}),
            environment=self._variables,
            limit=self.given.limit,
        )

    def rollouts(self, prompts: int, samples: int, row_tokens: int = 0) -> Path:
        path = self.folder / f"rollouts-{prompts}x{samples}.json"
        if not path.exists():
            print(f"making {prompts} x {samples} rollouts ...", flush=True)
            sizes = {"prompts": prompts, "samples": samples, "row_tokens": row_tokens}
            child = self.child("headrace rollouts", work="rollouts", **sizes)
            child.run(self.folder)
            (self.folder / f"{child.name}.out.json").rename(path)
        return path

    def steps(self, only: list[str]) -> dict[str, Json]:
        rollouts = str(self.rollouts(self.prompts, self.samples, self.given.row_tokens))
        common = {"work": "step", "rollouts": rollouts, "samples": self.samples, "steps": self.given.steps}
        found = {}
        for name, options in CONTENDERS.items():
            if not name.startswith(tuple(only)):
                continue
            child = self.child(name, **common, **options, **self._size(name))
            if one := self.results.measure(name, lambda child=child: child.run(self.folder)):  # type: ignore[misc]
                found[name] = one
        return found

    def _size(self, name: str) -> Json:
        ours = name.startswith("headrace")
        return {"microbatch_tokens": self.given.microbatch_tokens} if ours else {"rows_at_once": self.given.trl_rows}

    def same_gradients(self) -> str:
        """Compares both sides with the loss written out in float64. Raises SystemExit if one differs."""
        rollouts, found = str(self.rollouts(**SMALL)), {}
        for side, work in (("headrace", "truth"), ("headrace", "gradients"), ("trl", "gradients")):
            file = self.folder / f"{work}-{side}.safetensors"
            options = {"rollouts": rollouts, "dtype": "float32", "gradients": str(file), "steps": 1}
            sizes = {"samples": SMALL["samples"], **self._size(side)}
            self.child(f"{side} {work}", work=work, **options, **sizes).run(self.folder)
            found[side, work] = load_file(file)
        right, said = found["headrace", "truth"], []
        for side in ("headrace", "trl"):
            verdict, close = compare(found[side, "gradients"], right)
            if not close:
                raise SystemExit(f"{side} does not compute the gradient: {verdict}")
            said.append(f"{side}: {verdict}")
        return "; ".join(said)

    def lengths(self) -> Iterator[str]:
        yield "| tokens of one row | peak, GiB | of which the step, MiB | a token, KiB | s |"
        yield "|---|---|---|---|---|"
        for tokens in LENGTHS:
            child = self.child(f"headrace length {tokens}", work="length", tokens=tokens, dtype="bfloat16")
            if found := self.results.measure(child.name, lambda child=child: child.run(self.folder)):  # type: ignore[misc]
                own = found["peak_gib"] - found["before_gib"]
                yield (
                    f"| {tokens} | {found['peak_gib']:.2f} | {own * 1024:.0f} | {own * 2**20 / tokens:.0f} "
                    f"| {found['seconds']:.2f} |"
                )


def compare(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> tuple[str, bool]:
    """Returns (the results, whether they agree)."""
    if found.keys() != right.keys():
        return f"they name different parameters: {sorted(found.keys() ^ right.keys())[:4]}", False
    off = {name: float((found[name] - right[name]).norm() / (right[name].norm() + 1e-30)) for name in found}
    squares = [sum(float(one[name].double().square().sum()) for name in found) for one in (found, right)]
    whole = sum(float((found[name] - right[name]).double().square().sum()) for name in found) / squares[1]
    worst = max(off, key=lambda name: off[name])
    message = (
        f"norms {squares[0] ** 0.5:.6g} and {squares[1] ** 0.5:.6g}, relative difference {whole**0.5:.1e} over all, "
        f"{off[worst]:.1e} in the worst parameter ({worst})"
    )
    return message, whole**0.5 < TOLERANCE


def table(found: dict[str, Json]) -> Iterator[str]:
    yield (
        "| | s a step | CPU-s a step | trained tokens/s | headrace bf16 is faster by | peak memory, GiB | of TRL's least | "
        "tokens forwarded | microbatches | others took | how |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    rates = {name: rate(one) for name, one in found.items()}
    best = rates.get("headrace bf16")
    theirs = [peak(one) for name, one in found.items() if name.startswith("trl")]
    for name, one in found.items():
        faster = f"{best / rates[name]:.2f}" if best else "–"
        share = f"{peak(one) / min(theirs):.2f}" if theirs else "–"
        seconds = [step["seconds"] for step in one["steps"]]
        others = max(step["others"] for step in one["steps"])
        yield (
            f"| {name} | {statistics.median(seconds):.1f} | {cpu_seconds(one):.1f} | {rates[name]:.1f} | {faster} | {peak(one):.2f} | {share} "
            f"| {one['forward_tokens']} | {one['microbatches']} | {others:.0%} | {one['path']} |"
        )


def rate(one: Json) -> float:
    return one["loss_tokens"] / statistics.median(step["seconds"] for step in one["steps"])


def cpu_seconds(one: Json) -> float:
    return statistics.median(step["cpu_seconds"] for step in one["steps"])


def peak(one: Json) -> float:
    return max(step["peak_gib"] for step in one["steps"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a directory or a known name")
    parser.add_argument("--scale", default="16x16", help="prompts x completions of each (default: %(default)s)")
    parser.add_argument("--row-tokens", type=int, default=0, help="of every row, which is text and not sampled")
    parser.add_argument("--steps", type=int, default=2, help="timed optimizer steps of each contender")
    parser.add_argument("--only", default="headrace,trl", help=f"how names begin, of: {'; '.join(CONTENDERS)}")
    parser.add_argument("--trl-rows", type=int, default=8, help="rows that TRL forwards at once (its default: 8)")
    parser.add_argument("--microbatch-tokens", type=int, default=2048, help="that headrace forwards at once")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds that a contender may take")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-trainer", help="of results and logs")
    parser.add_argument("--again", action="store_true", help="measure anew what was measured before")
    parser.add_argument("--skip", default="", help="parts left out, of gradients,lengths")
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it must not leave contenders behind
    given = arguments()
    bench = Bench(given)
    only = given.only.split(",")
    if not TRL.exists():
        print(f"TRL is left out: there is no {TRL.parents[1].name}; `make bench-trl-setup` builds it", flush=True)
        only = [name for name in only if not name.startswith("trl")]
    lines = [machine(), ""]
    if TRL.exists() and "gradients" not in given.skip:
        lines += [f"Gradients in float32 (2 x 4) against float64: {bench.same_gradients()}", ""]
        print(lines[-2], flush=True)
    found = bench.steps(only)
    lines += [*table(found), ""]
    if "lengths" not in given.skip:
        lines += bench.lengths()
    print("\n" + "\n".join(lines))
    (bench.folder / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
