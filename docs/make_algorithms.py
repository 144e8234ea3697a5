"""Writes the tables of recipes and of losses, and the list of references, into docs/algorithms.md, between its marks: `make docs`.

Names, constants and references are those of `headrace/algo/recipes.py`; the formula and the source of a loss are the docstring of its class, and its
unit is what it says that it looks at.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from headrace.algo.config import AlgoConfig
from headrace.algo.policy.loss import Loss
from headrace.algo.recipes import LOSSES, RECIPES, REFERENCES, Recipe

TARGET = Path(__file__).with_name("algorithms.md")


def recipes() -> Iterator[str]:
    yield "| `algo.name` | advantage | loss | aggregation | what is special, and the source |\n|---|---|---|---|---|"
    usual = RECIPES[AlgoConfig().name]
    for name, recipe in RECIPES.items():
        cells = (
            (recipe.advantage, usual.advantage),
            (_loss(recipe.loss), _loss(usual.loss)),
            (recipe.aggregation, usual.aggregation),
        )
        shown = ["" if one == other and recipe is not usual else one for one, other in cells]
        default = " (default)" if recipe is usual else ""
        told = "; ".join(one for one in (_special(recipe), _sources(name, recipe)) if one)
        yield f"| {' | '.join([f'`{name}`{default}', *shown, told])} |"


def _sources(name: str, recipe: Recipe) -> str:
    """Returns the recipe's papers, or the code that is its source if it has none."""
    return ", ".join(_paper(one) for one in recipe.papers) or re.sub(r", `[^`]*`", "", REFERENCES[name])


def losses() -> Iterator[str]:
    yield (
        "| `algo.loss` | looks at | the loss of a token, its source, and the choice made | constants |\n|---|---|---|---|"
    )
    for name, loss in LOSSES.items():
        constants = ", ".join(f"{one} {value:g}" for one, value in loss().constants().items())
        text = " ".join((inspect.getdoc(loss) or "").split()).replace("|", "\\|")
        for paper in RECIPES[name].papers if name in RECIPES else ():
            text = text.replace(f", arXiv {paper}", "")  # the recipe's row links to it
        yield f"| `{name}` | {_unit(loss)} | {text} | {constants} |"


def _unit(loss: type[Loss]) -> str:
    """Returns the tokens that the loss of one token depends on."""
    if loss.pairs:
        return "pairs of rollouts"
    return {"token": "the token", "sequence": "its trajectory", "step": "the step"}[loss.reach]


def references() -> Iterator[str]:
    """Yields what the recipes were compared with, those of one reference together."""
    named: dict[str, list[str]] = {}
    for name, reference in REFERENCES.items():
        named.setdefault(reference, []).append(name)
    for reference, names in named.items():
        yield f"- {', '.join(f'`{name}`' for name in names)}: {reference}"


def _loss(loss: Loss) -> str:
    """Names a loss, with those of its constants that differ from the loss's own."""
    own = type(loss)().constants()
    others = [f"{name} {value:g}" for name, value in loss.constants().items() if value != own[name]]
    return ", ".join([loss.name, *others])


def _special(recipe: Recipe) -> str:
    one, said = recipe.correction, [recipe.about] if recipe.about else []
    if recipe.old != "sampler":
        said.append(f"old = {recipe.old}")
    if one.mode != "none":
        said.append(f"{one.level} {one.mode} [{one.low:g}, {one.high:g}]")
    said += [f"{rule.name} {rule.threshold:g}" for rule in one.rules]
    match recipe.select.kind:
        case "second_moment":
            said.append(f"selection second_moment, tau {recipe.select.tau:g}")
        case "clip_cov" | "kl_cov":
            said.append(f"selection {recipe.select.kind}, {recipe.select.share:g} of the tokens")
    if recipe.subset.kind != "none":
        said.append(f"trains half of a group: subset {recipe.subset.kind}")
    if recipe.distill.kind != "none":
        over = {"student_top": ", student_top", "vocabulary": ", vocabulary"}.get(recipe.distill.over, "")
        said.append(f"distill {recipe.distill.kind}{over}")
    return "; ".join(said)


def _paper(source: str) -> str:
    return f"[{source}](https://arxiv.org/abs/{source})" if re.fullmatch(r"\d{4}\.\d{5}", source) else source


def page(text: str) -> str:
    """Returns the page with the current tables and list. Raises ValueError if a mark is missing."""
    for name, lines in (("recipes", recipes()), ("losses", losses()), ("references", references())):
        begin, end = f"<!-- {name}: `make docs` -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}{chr(10).join(lines)}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
