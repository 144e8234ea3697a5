"""The algorithm that results from the recipe and the settings, the prompts of teachers that have their own, and the page that `--dry-run` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from headrace.algo.advantages import ATTEMPTS, STATE_WEIGHT
from headrace.algo.config import AlgoConfig
from headrace.algo.recipes import Recipe
from headrace.core.types import Prompt
from headrace.episodes.scoring.teacher.own_prompt import OwnPrompt
from headrace.native.resources import gib
from headrace.run.rehearsal.first_rows import lengths
from headrace.run.rehearsal.machine import Machine
from headrace.run.rehearsal.memory_needs import MemoryNeed

WIDTH, LABEL = 80, 13

Lines = Sequence[tuple[str, str]]
"""Pairs of label and text."""


def algorithm(algo: AlgoConfig) -> Lines:
    """Returns a line for each choice of the algorithm. `algo`: with its `length_constant` filled in."""
    recipe = algo.recipe
    return [
        ("recipe", algo.name),
        ("loss", _loss(recipe)),
        ("anchor", _ANCHORS[recipe.old]),
        ("advantage", recipe.advantage + _attempts(algo) + _penalties(algo)),
        ("trained", _SUBSETS[recipe.subset.kind].format(keep=recipe.subset.keep or "half")),
        ("credit", _credit(algo)),
        ("correction", _correction(recipe)),
        ("lag weight", _tuple(recipe.lag, {"constant": "none", "exponential": "decay", "trim": "maximum"})),
        (
            "selection",
            _tuple(
                recipe.select,
                {"none": "none", "second_moment": "tau", "clip_cov": "share", "kl_cov": "share", "entropy": "share"},
            ),
        ),
        ("KL", _kl(recipe)),
        ("entropy", _entropy(recipe)),
        ("distillation", _distill(recipe)),
        (
            "denominator",
            _AGGREGATIONS[recipe.aggregation].format(constant=algo.length_constant) + _DENOMINATORS[algo.denominator],
        ),
        ("cut off", "completions cut off at max_tokens " + _OVERLONG[algo.overlong]),
    ]


def _credit(algo: AlgoConfig) -> str:
    recipe = algo.recipe
    if algo.trains_rewards:
        beta = recipe.process.beta
        return f"every token has its own advantage: by what a second adapter rewards from there on (beta = {beta:g}), and by its rollout's outcome"
    if recipe.credit != "state":
        return f"every {recipe.credit} of a group has its own advantage"
    return (
        f"every turn has its rollout's advantage, and {algo.state_weight or STATE_WEIGHT:g} times that of its return (discounted by {recipe.gamma:g} a turn) "
        "among turns that began in the same state"
    )


def _entropy(recipe: Recipe) -> str:
    rule = recipe.entropy
    if not rule.on:
        return "none"
    aimed = f", from there on by {rule.change:g} a step towards a mean of {rule.target:g} nats" if rule.target else ""
    return f"a bonus of {rule.coef:g} times the entropy of every token{aimed}"


_SUBSETS = {
    "none": "all rollouts of a group",
    "max_variance": "{keep} of a group's rollouts: those whose rewards differ most (algo.subset)",
    "shortest": "{keep} of a group's rollouts: those with the fewest tokens (algo.subset)",
    "cleanest": "{keep} of a group's rollouts: right and wrong ones in their shares, of the right ones the cleanest (algo.subset)",
    "efficient": "{keep} of a group's rollouts: those with the most reward for a token (algo.subset)",
}
_ANCHORS = {
    "sampler": "ratios to the sampler's log-probs (algo.old = sampler)",
    "trainer": "ratios to the trainer's own log-probs before the update: they are 1 (algo.old = trainer)",
    "loglinear": "ratios to a policy between sampler and trainer, by lag (algo.old = loglinear)",
}
_AGGREGATIONS = {
    "token_mean": "all tokens of the optimizer step (token_mean)",
    "seq_mean_token_mean": "each sequence's tokens, then the step's sequences (seq_mean_token_mean)",
    "seq_mean_token_sum": "the step's sequences; tokens are summed (seq_mean_token_sum)",
    "token_sum": "the step's sequences times {constant} tokens (token_sum)",
    "pair_mean": "the step's pairs of rollouts (pair_mean)",
}
_DENOMINATORS = {"all": "", "kept": "; tokens that a rule masks are not counted (algo.denominator = kept)"}
_OVERLONG = {"train": "are trained on", "mask": "are left out of the loss and its denominator"}


def _loss(recipe: Recipe) -> str:
    constants = ", ".join(recipe.loss.words())
    return f"{recipe.loss}: {constants}" if constants else str(recipe.loss)


def _attempts(algo: AlgoConfig) -> str:
    return f", k = {algo.attempts or ATTEMPTS}" if algo.recipe.advantage == "best_of_k" else ""


def _penalties(algo: AlgoConfig) -> str:
    return f", less length_penalty = {_plain(algo.length_penalty)}" if algo.length_penalty else ""


def _correction(recipe: Recipe) -> str:
    correction = recipe.correction
    weights = (
        []
        if correction.mode == "none"
        else [f"{correction.mode} {correction.level} weights to [{_plain(correction.low)}, {_plain(correction.high)}]"]
    )
    others = [f"{rule.name} = {_plain(rule.threshold)}" for rule in correction.rules]
    return ", ".join([*weights, *others]) or "none"


def _tuple(value: Any, reads: dict[str, str]) -> str:
    name = reads[value.kind]
    return name if name == "none" else f"{value.kind}, {name} = {_plain(getattr(value, name))}"


def _kl(recipe: Recipe) -> str:
    kl = recipe.kl
    more = (", unbiased" if kl.unbiased else "") + (f", adapted towards {_plain(kl.target)} nats" if kl.target else "")
    more += f", from the policy of the last step that {kl.every} divides" if kl.every else ""
    return f"{_plain(kl.coef)} x {kl.estimator} in the {kl.place}{more}" if kl.coef else "none"


def _distill(recipe: Recipe) -> str:
    distill = recipe.distill
    if distill.kind == "none":
        return "none"
    tokens = {
        "teacher_top": f" over the teacher's top {distill.k}",
        "student_top": f" over the student's top {distill.k}",
        "vocabulary": " over the vocabulary",
    }
    over = tokens[distill.over] if distill.compares else ""
    heat = f" at temperature {_plain(distill.temperature)}" if distill.compares and distill.temperature != 1 else ""
    held = f", the trainer holds {distill.model}" if distill.model else ""
    return f"{distill.kind}{over}{heat}, coefficient {_plain(distill.coef)}{held}"


def _plain(value: float) -> str:
    return f"{value:.6g}"


# --- the page ----------------------------------------------------------------------------------------------------------


def shown_to_teacher(
    name: str,
    shows: OwnPrompt,
    prompts: Sequence[Prompt],
    written: Callable[[Sequence[int]], str],
    *,
    context: int,
    most: int,
) -> tuple[Lines, str, bool]:
    """Returns lines about the first prompts as a teacher with its own prompt reads them, a sentence if some are too long for it, and whether all
    are for certain. `written`: returns the text of tokens; `context`: tokens that the teacher's engine takes; `most`: those of a completion.
    Raises ConfigError for a prompt that cannot be shown."""
    read = [msgspec.structs.replace(prompt, tokens=shows.tokens(prompt)) for prompt in prompts]
    behind = 2 * most if shows.reads_sibling else most
    seen, problem = lengths(read, context - behind), ""
    if seen.too_long:
        which = "all" if seen.too_long == seen.looked_at else f"{seen.too_long} of {seen.looked_at}"
        what = "the completion that is shown and the one that is scored" if shows.reads_sibling else "the completion"
        problem = (
            f"{which} prompts that were looked at are too long as the teacher {name} reads them ({seen.shortest} to {seen.longest} tokens): with "
            f"{what} (rollout.max_tokens = {most}) they do not fit into its {context} tokens; set engine.context_length of its table to "
            f"{seen.longest + behind}, show it less, or lower rollout.max_tokens"
        )
    message = f"{seen.shortest} to {seen.longest} tokens before the completion, median {seen.median}; there is room for {context - behind}"
    lines = [(name, message), ("it reads", written(read[0].tokens)), ("", f"({read[0].id})")]
    return lines, problem, seen.shortest > context - most


def memory_lines(needs: Sequence[MemoryNeed], machine: Machine) -> Lines:
    """Returns a line for each part of each process, and the machine's memory."""
    lines = []
    for who in dict.fromkeys(need.who for need in needs):
        own = [need for need in needs if need.who == who]
        lines += [(who if need is own[0] else "", _amount(need)) for need in own]
    total = sum(need.bytes for need in needs if need.where == "cpu")
    free = f"this machine has {gib(machine.memory)}, and {gib(machine.available)} are free"
    lines.append(("together", f"{gib(total):>9}  {free}"))
    if machine.gpu:
        on_gpu = sum(need.bytes for need in needs if need.where == "cuda")
        lines.append(("on the GPU", f"{gib(on_gpu):>9}  {machine.gpu[0]} has {gib(machine.gpu[1])}"))
    return lines


def _amount(need: MemoryNeed) -> str:
    return f"{gib(need.bytes):>9}  {need.what}{' (on the GPU)' if need.where == 'cuda' else ''}"


def page(sections: dict[str, Lines], notes: Iterable[str]) -> str:
    """Formats the notes, which ask for something, and the sections, wrapped at 80 columns."""
    blocks = [
        "\n".join([title, *(line for entry in lines for line in _entry(*entry))]) for title, lines in sections.items()
    ]
    return "\n\n".join([*(_note(note) for note in notes), *blocks])


def _entry(label: str, text: str) -> Iterator[str]:
    """Wraps one entry. Line breaks within the text (a prompt's) are kept."""
    for number, line in enumerate(text.splitlines() or [""]):
        first = f"  {label if not number else '':<{LABEL}} "
        line = line.replace("\t", "    ")
        wrapped = textwrap.wrap(
            line, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), drop_whitespace=True
        )
        yield from wrapped or [first.rstrip()]


def _note(text: str) -> str:
    return textwrap.fill(f"note: {text}", WIDTH, subsequent_indent="      ", break_long_words=False)
