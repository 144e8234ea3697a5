"""The shape of the code: floors, circles, budgets, what `import headrace` costs, where concrete classes are named."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import gc
import graphlib
import itertools
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.run.config import RunConfig, load_config

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "headrace"
RECIPES = sorted((ROOT / "recipes").glob("*/*.toml"))

# A file imports only from lower floors; parts of one floor never import each other. Inside a folder `ROOMS` has the order.
FLOORS = {
    "version": 0,
    "core": 1,
    "native": 1,
    "durable": 2,
    "settings": 2,
    "web": 2,
    "algo": 3,
    "models": 3,
    "facts": 4,
    "trainer": 5,
    "processes": 5,
    "weight_sync": 6,
    "engine": 7,
    "episodes": 7,
    "views": 7,
    "loop": 8,
    "run": 9,
    "__init__": 10,
    "serve": 10,
    "commands": 11,
    "compat": 12,
    "testing": 11,
    "cli": 12,
    "__main__": 13,
}

# The rooms of a folder, from the lowest up: each imports only from those before it. A folder's own files have no order of their
# own, but a folder has no circle among its rooms and files.
ROOMS = {
    "algo": ("policy",),
    "commands": ("replay", "show", "serving", "running", "training", "publishing", "installed", "plan", "importing"),
    "commands.plan": ("rates", "parts"),
    "core": ("chat",),
    "engine": ("native", "remote", "servers", "fleet"),
    "engine.native": ("runners", "kernels"),
    "episodes": ("sandbox", "tasks", "scoring", "environments"),
    "episodes.environments": ("workers", "libraries", "gateway", "agents", "atropos", "verifiers"),
    "episodes.sandbox": ("kernel", "inside"),
    "episodes.scoring": ("workers", "services", "teacher"),
    "loop": ("world",),
    "processes": ("health", "launch", "joining", "placed"),
    "run": ("rehearsal", "auto", "fleets", "hosts", "worker", "clients"),
    "run.hosts": ("bus",),
    "serve": ("routes", "training"),
    "testing": ("servers", "faultsim"),
    "trainer": ("kernels", "dealing", "packing", "model", "forward", "placement", "step", "shared"),
    "views": ("screen", "report", "sinks", "board"),
    "weight_sync": ("delta", "in_vllm"),
}
HEAVY = ("torch", "transformers", "datasets", "pandas", "matplotlib", "rich", "reasoning_gym", "pydantic")

# Concrete class -> the part that owns it. Elsewhere only the two build.py name it: everybody else holds a protocol.
CONCRETE = {
    "NativeEngine": "engine",
    "FakeEngine": "testing",
    "TorchTrainer": "trainer",
    "FakeTrainer": "testing",
    "RewardScorer": "episodes",
    "FakeScorer": "testing",
    "ReasoningGymTask": "episodes",
    "RowsTask": "episodes",
    "SeedsTask": "episodes",
    "FakeTask": "testing",
    "SingleTurn": "episodes",
    "FunctionEnvironment": "episodes",
    "AgentEnvironment": "episodes",
    "ScriptedTurns": "testing",
}
BUILD = ("run/build.py", "run/worker/build.py")

MAX_FUNCTION, MAX_FILE, MAX_MEDIAN = 60, 700, 15


MAX_BY_POSITION = 5
"""Values that a call passes without their names; a star counts as one. mypy cannot see two ints swapped."""
NAMELESS = {
    "apply",  # torch.autograd.Function, and what it saves
    "save_for_backward",
    "kernel",  # torch's attention, whose names differ between its versions
    "varlen_attn",
    "adamw",
    "_linear_pointwise",
    "headrace_draw",  # C
    "headrace_norm",
    "zeros",  # a shape
    "_table",  # columns
}
"""Functions that take any number of values of one kind, or that have no names to call their parameters by."""


DANGLING = (
    *("After", "As", "At", "Before", "By", "For", "From", "In", "Of", "On", "Per", "Since", "To", "Under"),
    *("What", "When", "Where", "While", "Who", "Whose", "Why", "With", "Without"),
)
"""No docstring begins with one of these: such a sentence has no subject."""
LEANING = ("The same", "Those", "It", "That", "Likewise", "Ditto", "They", "Them", "There", "Such", "Otherwise")
"""Nor with one of these: its subject is what stands above it, which may be moved."""
LEANING_ALONE = re.compile(r"(Its|Their|Nothing|(Whether|How|Which of|Like) (it|its|they|their|these|those))\b")
"""Nor does that of a function or class begin with one of these. A field's subject is its class."""


SETTINGS_AT = ("__init__", "run", "commands", "testing")
"""The rooms that know `RunConfig`. All others are given their own section."""
SECTIONS = {"config", "way", *(field.name for field in dataclasses.fields(RunConfig))} - {
    "model",
    "name",
    "task",
    "out",
}
"""Names under which a function takes settings. They are typed: behind `Any` mypy sees no attribute of them."""
FOREIGN_SETTINGS = ("engine.native.runners", "compat.trl", "episodes.environments.verifiers", "testing")
"""Where `config` is one of transformers, peft or verifiers."""


# --- the checkers: each yields one sentence per violation --------------------------------------------------------------


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Without a garbage collection meanwhile: in Python 3.11 it is a SystemError if a finalizer (here: of an earlier asynchronous test)
    parses while another tree is made (python/cpython#106905)."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


@functools.cache
def _by_kind(path: Path) -> dict[type, list[Any]]:
    """The nodes of a file. A walk over all of the package takes a second, and there are twenty checkers."""
    found: dict[type, list[Any]] = {}
    for node in ast.walk(parsed(path)):
        found.setdefault(type(node), []).append(node)
    return found


@pytest.fixture(scope="module", autouse=True)
def _leave_no_trees() -> Iterator[None]:
    """A million nodes would be looked through at each search for garbage in later tests."""
    yield
    parsed.cache_clear()
    _by_kind.cache_clear()
    IMPORTS.clear()


def nodes(path: Path, *kinds: type) -> Iterator[Any]:
    """All nodes of these kinds in a file."""
    return itertools.chain.from_iterable(_by_kind(path).get(kind, ()) for kind in kinds)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def modules(package: Path) -> dict[str, Path]:
    """Dotted name below the package -> file; the package's own `__init__.py` goes by that name."""
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return names


IMPORTS: dict[Path, tuple[str, ...]] = {}
"""Kept for the other checkers of the same package."""


def imports(name: str, path: Path, known: dict[str, Path]) -> tuple[str, ...]:
    """Our modules that a file imports, anywhere in it: at the top, in a function, under TYPE_CHECKING."""
    if path not in IMPORTS:
        IMPORTS[path] = tuple(_imports(name, path, known))
    return IMPORTS[path]


def _imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    for node in nodes(path, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            yield from (target for alias in node.names if (target := _ours(alias.name, known)))
        else:
            base = node.module or ""
            if node.level:  # relative: rebuilt from the importing module's own name
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                above = package[: len(package) - node.level + 1]
                base = ".".join(["headrace", *above, *([node.module] if node.module else [])])
            for alias in node.names:
                if target := _ours(f"{base}.{alias.name}", known) or _ours(base, known):
                    yield target


def _ours(dotted: str, known: dict[str, Path]) -> str | None:
    if dotted == "headrace":
        return "__init__"
    below = dotted.removeprefix("headrace.")
    return below if below != dotted and below in known else None


def floor_violations(package: Path, floors: dict[str, int]) -> Iterator[str]:
    known = modules(package)
    for name, path in known.items():
        part = name.split(".")[0]
        if part not in floors:
            yield f"{name} has no floor: add it to FLOORS"
            continue
        for target in imports(name, path, known):
            other = target.split(".")[0]
            if other != part and floors.get(other, -1) >= floors[part]:
                yield f"{name} (floor {floors[part]}) imports {target} (floor {floors[other]})"


def circles(package: Path) -> Iterator[str]:
    known = modules(package)
    graph = {name: set(imports(name, path, known)) - {name} for name, path in known.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield " -> ".join(error.args[1])


def folders(known: dict[str, Path]) -> set[str]:
    return {".".join(name.split(".")[:depth]) for name in known for depth in range(1, name.count(".") + 1)}


def room_violations(package: Path, rooms: dict[str, tuple[str, ...]]) -> Iterator[str]:
    known = modules(package)
    edges = {name: set(imports(name, path, known)) for name, path in known.items()}
    every = folders(known)
    for folder in sorted(every):
        inner, order = (
            {name.rpartition(".")[2] for name in every if name.rpartition(".")[0] == folder},
            rooms.get(folder, ()),
        )
        if len(inner) > 1 and inner != set(order):
            yield f"{folder} has the rooms {sorted(inner)}, and ROOMS {sorted(order)}"
            continue
        graph = _inside(folder, edges)
        for number, room in enumerate(order):
            yield from (f"{folder}.{room} imports {folder}.{one}" for one in order[number + 1 :] if one in graph[room])
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            yield f"{folder}: {' -> '.join(error.args[1])}"


def _inside(folder: str, edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Room or file of a folder -> those beside it that it imports anything of."""

    def child(name: str) -> str:
        return name.removeprefix(f"{folder}.").split(".")[0]

    graph: dict[str, set[str]] = {}
    for name in (name for name in edges if name.startswith(f"{folder}.")):
        targets = {child(target) for target in edges[name] if target.startswith(f"{folder}.")}
        graph.setdefault(child(name), set()).update(targets - {child(name)})
    return graph


def unordered(package: Path) -> Iterator[str]:
    """Folders whose `__init__.py` does not say in which order to read their files."""
    for folder in sorted({path.parent for path in package.rglob("*.py")} - {package}):
        init = folder / "__init__.py"
        said = (ast.get_docstring(parsed(init)) or "") if init.exists() else ""
        names = [path.name for path in sorted(folder.glob("*.py")) if path != init]
        if missing := [name for name in names if name not in said]:
            yield f"{folder.relative_to(package)}/__init__.py does not say when to read {', '.join(missing)}"


def budget_violations(package: Path) -> Iterator[str]:
    for name, path in modules(package).items():
        text = path.read_text()
        if (lines := len(text.splitlines())) > MAX_FILE:
            yield f"{name} has {lines} lines"
        for node in nodes(path, *FUNCTIONS):
            if _length(node) > MAX_FUNCTION:
                yield f"{name}.{node.name} has {_length(node)} lines"


def _length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def function_lengths(package: Path) -> list[int]:
    return [_length(node) for path in modules(package).values() for node in nodes(path, *FUNCTIONS)]


def concrete_names(package: Path, concrete: dict[str, str]) -> Iterator[str]:
    for path in modules(package).values():
        place = path.relative_to(package)
        named = {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name"}
        for node in nodes(path, *named):
            word = getattr(node, named[type(node)])
            if word in concrete and place.parts[0] != concrete[word] and place.as_posix() not in BUILD:
                yield f"{place} names {word}"


def long_calls(package: Path) -> Iterator[str]:
    for path in modules(package).values():
        for node in nodes(path, ast.Call):
            if len(node.args) > MAX_BY_POSITION:
                called = ast.unparse(node.func)
                if called.rpartition(".")[2] not in NAMELESS:
                    yield f"{path.relative_to(package)}:{node.lineno} passes {len(node.args)} values by position to {called}"


def long_definitions(package: Path) -> Iterator[str]:
    """Dataclasses and functions that can be given more than five values by position."""
    for path in modules(package).values():
        for node in nodes(path, ast.ClassDef):
            if _is_dataclass(node) and _positional_fields(node) > MAX_BY_POSITION:
                yield f"{path.relative_to(package)} {node.name}"
            if not _is_autograd(node):
                yield from (
                    f"{path.relative_to(package)} {node.name}.{function.name}" for function in _long_functions(node)
                )
        yield from (f"{path.relative_to(package)} {function.name}" for function in _long_functions(parsed(path)))


def _decorator(node: ast.ClassDef) -> ast.expr | None:
    """`dataclass`, by whatever name it was imported."""
    return next((one for one in node.decorator_list if _last_word(one) in ("dataclass", "plain")), None)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return _decorator(node) is not None


def _is_autograd(node: ast.ClassDef) -> bool:
    """torch calls `forward` of these by position."""
    return any(_last_word(base) == "Function" for base in node.bases)


def _last_word(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def _keyword(node: ast.expr | None, name: str) -> bool | None:
    """The literal value of a call's keyword; None where it is not given."""
    given = node.keywords if isinstance(node, ast.Call) else []
    return next((ast.literal_eval(one.value) for one in given if one.arg == name), None)


def _positional_fields(node: ast.ClassDef) -> int:
    named, count = _keyword(_decorator(node), "kw_only") or False, 0
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in (kind := ast.unparse(field.annotation)):
            if kind.endswith("KW_ONLY"):
                named = True
                continue
            own = _keyword(field.value, "kw_only")
            count += not (named if own is None else own) and _keyword(field.value, "init") is not False
    return count


def _long_functions(scope: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Those defined in it, also inside its functions, but not in other classes."""
    todo = collections.deque[ast.AST](scope.body)
    while todo:
        node = todo.popleft()
        if isinstance(node, ast.ClassDef):
            continue
        if isinstance(node, FUNCTIONS):
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
            launched = any(
                "jit" in ast.unparse(decorator) for decorator in node.decorator_list
            )  # Triton's take keywords anyway
            if len(names) - (names[:1] in (["self"], ["cls"], ["ctx"])) > MAX_BY_POSITION and not launched:
                yield node
        todo += ast.iter_child_nodes(node)


def settings_past_the_door(package: Path) -> Iterator[str]:
    for name, path in modules(package).items():
        named = {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name", ast.Constant: "value"}
        for node in nodes(path, *named):
            if getattr(node, named[type(node)]) == "RunConfig" and name.split(".")[0] not in SETTINGS_AT:
                yield f"{name} names RunConfig"
        for node in nodes(path, ast.arg):
            ours = node.arg in SECTIONS and not name.startswith(FOREIGN_SETTINGS)
            if ours and node.annotation and ast.unparse(node.annotation) == "Any":
                yield f"{name} takes {node.arg} as Any"


MOST_WITH_THE_CONFIG = 112
"""Functions that may take the whole config. It was 146 once; whoever needs more passes sections somewhere else."""


def takers_of_the_config(package: Path) -> Iterator[str]:
    for name, path in modules(package).items():
        for node in nodes(path, *FUNCTIONS):
            taken = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if any(arg.annotation and re.search(r"\bRunConfig\b", ast.unparse(arg.annotation)) for arg in taken):
                yield f"{name}.{node.name}"


LOOP_SAYS = ("Consumes: ", "Waits for: ", "Unblocked by: ")


def silent_loops(room: Path) -> Iterator[str]:
    """Coroutine functions of a room that it starts as tasks, and whose docstrings lack a line of `LOOP_SAYS`."""
    files = sorted(room.glob("*.py"))
    started = {
        _last_word(node.args[0])
        for path in files
        for node in nodes(path, ast.Call)
        if _last_word(node) in ("create_task", "ensure_future") and node.args
    }
    for node in (node for path in files for node in nodes(path, ast.AsyncFunctionDef)):
        if node.name in started:
            text = ast.get_docstring(node) or ""
            yield from (f"{node.name} does not say: {line}" for line in LOOP_SAYS if line not in text)


SHARED_FILE_NAMES = {"__init__.py", "build.py", "binding.py", "config.py", "errors.py", "fake.py", "kinds.py"}
"""File names that several packages have because they mean the same thing in each: its settings, its fake, its table of kinds."""


def names_used_twice(package: Path) -> Iterator[str]:
    """Public classes and files of one name in two places: a reader could not tell which of them is meant."""
    places: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package).as_posix()
        if path.name not in SHARED_FILE_NAMES:
            places.setdefault(path.name, []).append(where)
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(where)
    yield from (f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1)


PRINTERS = ("core/printing.py", "views/screen/console.py")
"""The files through which everything goes to a terminal. They let nothing pass that a terminal would obey."""
OTHER_PROGRAMS = (
    "episodes/sandbox/zygote.py",
    "episodes/sandbox/inside/*.py",
    "episodes/environments/verifiers/taskset_player.py",
)
"""Programs that import nothing of ours: their output is a pipe or a log of ours."""
PRINTING_CALLS = {
    *("print", "sys.stdout.write", "sys.stderr.write", "sys.stdout.writelines", "sys.stderr.writelines"),
    *("sys.__stdout__.write", "sys.__stderr__.write", "warnings.showwarning", "faulthandler.dump_traceback"),
    *("traceback.print_exc", "traceback.print_exception", "traceback.print_stack", "traceback.print_tb"),
    *("logging.basicConfig", "logging.StreamHandler", "rich.print", "rich.get_console", "rich.inspect"),
    *("rich.console.Console", "rich.text.Text", "RichConsole", "RichText", "Text.from_markup", "Text.from_ansi"),
}
RICH = {"console": ("Console", "RichConsole"), "text": ("Text", "RichText")}
"""Classes of rich that views have only for annotations, by the name that tells them from ours."""


def prints_elsewhere(package: Path) -> Iterator[str]:
    """Ways to the terminal past the two files, and markup, which would be read in users' text too."""
    for path in modules(package).values():
        place = path.relative_to(package)
        if place.as_posix() in PRINTERS or any(place.match(other_program) for other_program in OTHER_PROGRAMS):
            continue
        for node in nodes(path, ast.ImportFrom, ast.Call):
            if said := _way_to_the_terminal(node):
                yield f"{place}:{node.lineno} {said}"


def _dotted(node: ast.expr) -> str:
    """`a.b.c`; of what is no name, as it is written."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            return f"{name}.{attribute}"
    return ast.unparse(node)


def _way_to_the_terminal(node: ast.ImportFrom | ast.Call) -> str:
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rich":
        names = [(name.name, name.asname) for name in node.names]
        real, ours = RICH.get((node.module or "").removeprefix("rich."), ("", ""))
        wrong = [
            name for name, alias in names if (name == real and alias != ours) or name in ("print", "escape", "render")
        ]
        return f"imports rich's {wrong[0]}" if wrong else ""
    if isinstance(node, ast.ImportFrom):
        printing = node.module == "traceback" and any(name.name.startswith("print") for name in node.names)
        return "imports from traceback" if printing else ""
    called = _dotted(node.func)
    if called in PRINTING_CALLS:
        return f"calls {called}"
    if called in ("os.write", "os.fdopen", "open") and (first := ast.unparse(node.args[:1])) in ("1", "2"):
        return f"writes to descriptor {first}"
    if called in ("sys.exit", "SystemExit") and isinstance(next(iter(node.args), None), ast.JoinedStr):
        return f"prints with {called}"
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    if "markup" in named and ast.unparse(named["markup"]) != "False":
        return "sets markup"
    markup = [named[name] for name in ("title", "subtitle") if name in named] if called == "Panel" else []
    markup += node.args[:1] if called in ("console.status", "status.update") else []
    if any(not (isinstance(one, ast.Call) and ast.unparse(one.func) == "Text") for one in markup):
        return f"gives {called} a string, which rich reads as markup"
    return ""


def dangling_docstrings(package: Path) -> Iterator[str]:
    """Docstrings, those of fields and constants included, that begin with one of the DANGLING or LEANING words."""
    for path in modules(package).values():
        for node in nodes(path, ast.Expr):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                first, *more = node.value.value.split(maxsplit=2)
                first = " ".join([first, *more[:1]] if first == "The" else [first]).rstrip(",:")
                if first in DANGLING or first in LEANING:
                    yield f"{path.relative_to(package)}:{node.lineno} begins with {first}"
        for node in nodes(path, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
            if found := LEANING_ALONE.match(ast.get_docstring(node) or ""):
                yield f"{path.relative_to(package)}:{node.body[0].lineno} begins with {found[0]}"


# --- how much a module holds, offers and imports -----------------------------------------------------------------------

MAX_OFFERED, MAX_IMPORTS, SMALL = 12, 25, 80

OFFERS_MORE = {
    "algo.advantages": "an advantage is a function",
    "commands.plan.rates.hardware": "figures of devices, each by its own function",
    "core.protocols": "all ports in one place",
    "durable.journal": "records and how they are written, read and cut",
    "durable.segments": "one format, from frames to files",
    "facts.texts": "one function for each form of a number",
    "facts.run_state": "all that a reader keeps of a run, number by number",
    "facts.verdicts": "one function for each verdict",
    "processes.health.stacks": "stacks of this process and of another, and what they say",
    "loop.world.surroundings": "a fake for each thing that a run stands on",
    "trainer.forward.fused.fused_ops": "one call for each operation between products",
}
"""Modules with more than `MAX_OFFERED` functions and classes with methods that others import, and why."""

IMPORTS_MORE = {
    "loop.world.world": "assembles the loops around fakes",
    "run.build": "opens what the settings name",
    "run.config": "holds every section of the settings",
    "run.open_parts": "opens the parts of a run",
    "run.row_trial": "tries every part of a run",
    "run.starting": "starts every part of a run",
    "run.worker.build": "opens what a worker's settings name",
    "testing.faultsim.lives": "assembles a simulated run",
    "trainer.step.trainer": "joins all that a step consists of",
}
"""Modules that import more than `MAX_IMPORTS` of ours, and why: each is where parts are put together."""

MAY_BE_SMALL = {
    "engine.native.runners.fp8_kernels": "imports triton, which is not everywhere",
    "__main__": "Python opens it by this name",
    "algo.policy": "a loss is its file",
    "commands": "a command, or what it prints, is loaded when it is asked for",
    "engine.servers.server_guard": "a program of its own",
    "episodes.environments.agents.agent_reaper": "a program of its own",
    "run.worker": "torch is loaded in a worker only",
    "testing": "a fake, for tests",
    "views.build": "opens the views that the settings name",
    "views.screen": "one part of the screen each",
    "views.sinks": "a sink is its file, and loads its library",
    "weight_sync.in_vllm": "runs in vLLM's processes",
}
"""Modules, or folders of such, below `SMALL` lines that fewer than two others import, and why they are files."""


def crowded_modules(package: Path, allowed: Mapping[str, str]) -> Iterator[str]:
    known, wanted = modules(package), collections.defaultdict(set)
    for name, path in known.items():
        aliases: dict[str, str] = {}
        for node in nodes(path, ast.ImportFrom):
            for alias in node.names:
                if inner := _ours(f"{node.module}.{alias.name}", known):
                    aliases[alias.asname or alias.name] = inner
                elif (target := _ours(str(node.module), known)) and target != name:
                    wanted[target].add(alias.name)
        for node in nodes(path, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in aliases:
                wanted[aliases[node.value.id]].add(node.attr)
    for name in known.keys() - allowed:
        if len(offered := _with_behaviour(known[name]) & wanted[name]) > MAX_OFFERED:
            yield f"{name} offers {len(offered)} functions and classes to others"


def _with_behaviour(path: Path) -> set[str]:
    """Public functions, and classes that have any: not constants, nor records of fields, of which a vocabulary may have many."""
    return {
        node.name
        for node in parsed(path).body
        if isinstance(node, FUNCTIONS)
        or (isinstance(node, ast.ClassDef) and any(isinstance(one, FUNCTIONS) for one in node.body))
        if not node.name.startswith("_")
    }


def importing_modules(package: Path, allowed: Mapping[str, str]) -> Iterator[str]:
    known = modules(package)
    for name, path in known.items():
        if name not in allowed and (count := len({*imports(name, path, known)} - {name})) > MAX_IMPORTS:
            yield f"{name} imports {count} of our modules"


def small_modules(package: Path, allowed: Iterable[str]) -> Iterator[str]:
    """Leaves out kinds that a table opens by place, `headrace.room.file:NAME`: each is its file, however short."""
    known = modules(package)
    opened = {one for path in known.values() for one in re.findall(r'"headrace\.([\w.]+):\w+"', path.read_text())}
    importers = collections.Counter(
        target for name, path in known.items() for target in {*imports(name, path, known)} - {name}
    )
    for name, path in known.items():
        lines = len(path.read_text().splitlines())
        excused = (
            name in opened
            or path.name == "__init__.py"
            or any(name == one or name.startswith(f"{one}.") for one in allowed)
        )
        if not excused and lines < SMALL and importers[name] < 2:
            yield f"{name} has {lines} lines and {importers[name]} importers"


def files_named_and_absent(root: Path) -> Iterator[str]:
    """Sources that a docstring, a comment or a page names in backticks, by the end of their path, and that are not there. Left out: paths of
    other projects and of examples."""
    kept = [
        path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")
    ]  # an environment has 60,000 files
    there = [path.as_posix() for top in kept for path in top.rglob("*") if path.suffix in (".py", ".h", ".cpp")]
    pages = [
        *root.glob("*.md"),
        *(root / "docs").glob("*.md"),
        *(root / "headrace").rglob("*.py"),
        *(root / "tests").rglob("*.py"),
    ]
    for page in pages:
        if page.name in ("CHANGELOG.md", "test_layout.py"):
            continue
        for name in sorted({*re.findall(r"`((?:\w+/)*\w+\.(?:py|h|cpp))`", page.read_text())}):
            if not any(path.endswith(f"/{name}") for path in there) and not name.startswith(ELSEWHERE):
                yield f"{page.relative_to(root)} names {name}"


ELSEWHERE = (
    *(
        "make_rows.py",
        "path/to/",
        "tidied.py",
        "convert_hf_to_gguf.py",
        "sitecustomize.py",
        "torch/",
        "atroposlib/",
        "openenv/",
    ),
    *(
        "distributed/",
        "entrypoints/",
        "experts/",
        "fused_moe/",
        "managers/",
        "model_loader/",
        "sampling/sampling_params.py",
    ),
    *("server_args.py", "utils/weight_versions.py", "v1/", "vllm/"),
)
"""Beginnings of files of other projects, and of examples."""


# --- the code keeps to them --------------------------------------------------------------------------------------------


def test_floors():
    assert list(floor_violations(PACKAGE, FLOORS)) == []


def test_rooms_of_a_folder_have_an_order():
    assert list(room_violations(PACKAGE, ROOMS)) == []


def test_more_than_five_values_have_names():
    assert list(long_calls(PACKAGE)) == []


def test_definitions_with_more_than_five_values_take_keywords():
    as_in_trl = {"compat/trl/other_trainers.py OnlineDPOTrainer.__init__"}  # scripts give its arguments by position
    assert set(long_definitions(PACKAGE)) == as_in_trl


def test_docstrings_begin_with_their_subject_or_verb():
    assert list(dangling_docstrings(PACKAGE)) == []


def test_loops_say_what_they_consume_wait_for_and_are_unblocked_by():
    assert list(silent_loops(PACKAGE / "loop")) == []


def test_the_config_stops_at_the_door():
    assert list(settings_past_the_door(PACKAGE)) == []


def test_few_functions_take_the_whole_config():
    assert len(list(takers_of_the_config(PACKAGE))) <= MOST_WITH_THE_CONFIG


def test_everything_is_printed_by_the_printer_and_the_console():
    assert list(prints_elsewhere(PACKAGE)) == []


def test_a_name_has_one_meaning():
    assert not list(names_used_twice(PACKAGE))


def test_names_of_test_files_are_unique():
    """pytest imports them by name; it collects neither of two that share one."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_every_folder_says_in_which_order_to_read_it():
    assert list(unordered(PACKAGE)) == []


def test_no_order_without_a_folder():
    known = folders(modules(PACKAGE))
    named = {f"{folder}.{room}" for folder, rooms in ROOMS.items() for room in rooms}
    assert named <= known, f"ROOMS names what is not there: {named - known}"


def test_no_floor_without_a_file():
    parts = {name.split(".")[0] for name in modules(PACKAGE)}
    assert set(FLOORS) <= parts, f"FLOORS names what is not there: {set(FLOORS) - parts}"


def test_no_circles_typing_and_lazy_imports_included():
    assert list(circles(PACKAGE)) == []


def test_budgets():
    assert list(budget_violations(PACKAGE)) == []


def test_a_module_offers_few_things():
    assert list(crowded_modules(PACKAGE, OFFERS_MORE)) == []


def test_a_module_imports_few_of_ours():
    assert list(importing_modules(PACKAGE, IMPORTS_MORE)) == []


def test_files_that_texts_name_are_there():
    assert list(files_named_and_absent(ROOT)) == []


@pytest.mark.slow
def test_every_reason_is_about_a_module_that_needs_one():
    known = modules(PACKAGE)
    crowded = {module.split()[0] for module in crowded_modules(PACKAGE, {})}
    importing = {module.split()[0] for module in importing_modules(PACKAGE, {})}
    small = {module.split()[0] for module in small_modules(PACKAGE, ())}
    assert known.keys() >= crowded | importing | small
    assert OFFERS_MORE.keys() <= crowded
    assert IMPORTS_MORE.keys() <= importing
    assert [one for one in MAY_BE_SMALL if not any(name == one or name.startswith(f"{one}.") for name in small)] == []


def test_a_small_module_has_two_importers_or_a_reason():
    assert list(small_modules(PACKAGE, MAY_BE_SMALL)) == []


def test_median_function_is_short():
    assert statistics.median(function_lengths(PACKAGE)) <= MAX_MEDIAN


def test_concrete_classes_are_named_in_build_only():
    assert list(concrete_names(PACKAGE, CONCRETE)) == []


def test_concrete_classes_exist():
    defined = {node.name for path in modules(PACKAGE).values() for node in nodes(path, ast.ClassDef)}
    assert set(CONCRETE) <= defined, f"CONCRETE names what is not there: {set(CONCRETE) - defined}"


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_import_headrace_loads_nothing_heavy():
    assert not loaded_by("import headrace") & set(HEAVY)


def test_nothing_that_ships_imports_what_does_not():
    """`headrace/testing` is not in the wheel. Examples in docstrings import it, and run in a checkout."""
    imports = [
        f"{path.relative_to(PACKAGE)} imports {node.module}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.is_relative_to(PACKAGE / "testing")
        for node in nodes(path, ast.ImportFrom)
        if str(node.module).startswith("headrace.testing")
    ]
    assert imports == []


@functools.cache
def names_of(module: str) -> set[str]:
    """The names that a module binds, and the modules of a folder; empty if there is none of this name."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return set()
    found = {one.stem for one in path.iterdir()} if path.is_dir() else set()
    for node in nodes(file, *FUNCTIONS, ast.ClassDef, ast.Name, ast.ImportFrom, ast.Import):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.ImportFrom() | ast.Import():
                found |= {(name.asname or name.name) for name in node.names}
    return found


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "recipes"])
def test_scripts_beside_the_package_import_what_there_is(folder: str) -> None:
    """mypy does not read them, and most are run once a month."""
    missing = [
        f"{path.relative_to(ROOT)}: {node.module} has no {name.name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in nodes(path, ast.ImportFrom)
        if str(node.module).startswith("headrace.")
        for name in node.names
        if name.name not in names_of(str(node.module))
    ]
    assert missing == []


def test_config_loads_without_torch():
    assert not loaded_by("import headrace.run.config") & ({*HEAVY, "numpy"} - {"pydantic"})


def test_the_process_that_watches_a_run_loads_nothing_heavy():
    assert not loaded_by("import headrace.processes.health.monitor") & {*HEAVY, "numpy", "asyncio", "msgspec"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(recipe):
    assert load_config(recipe).name == recipe.stem


def test_there_are_recipes():
    assert ROOT / "recipes" / "demo" / "demo.toml" in RECIPES


# --- the checkers can fail ---------------------------------------------------------------------------------------------


def plant(package: Path, **files: str) -> Path:
    for name, text in files.items():
        path = package.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_floor_checker_sees_lazy_typing_relative_and_sibling_imports(tmp_path):
    floors = {"low": 0, "high": 1, "side": 1}
    lazy = plant(tmp_path / "a", low="def f():\n    from headrace.high import x", high="x = 1")
    typing = plant(tmp_path / "b", low="if TYPE_CHECKING:\n    import headrace.high", high="")
    sibling = plant(tmp_path / "c", side="from headrace import high", high="")
    relative = plant(tmp_path / "d", low__inner="from ..high import x", high="x = 1")
    for package in (lazy, typing, sibling, relative):
        assert len(list(floor_violations(package, floors))) == 1
    assert list(floor_violations(plant(tmp_path / "e", high="import headrace.low", low=""), floors)) == []
    assert list(floor_violations(plant(tmp_path / "f", new=""), floors)) == ["new has no floor: add it to FLOORS"]


def test_circle_checker_sees_circles_inside_a_folder(tmp_path):
    package = plant(tmp_path, a__x="from headrace.a.y import z", a__y="def f():\n    import headrace.a.x")
    assert [sorted(set(circle.split(" -> "))) for circle in circles(package)] == [["a.x", "a.y"]]


def test_room_checker_sees_upward_imports_circles_through_files_and_rooms_without_an_order(tmp_path):
    files = {"a__high__y": "", "a__top": ""}
    order = {"a": ("low", "high")}
    upward = plant(tmp_path / "a", **files, a__low__x="def f():\n    from headrace.a.high.y import z")
    assert list(room_violations(upward, order)) == ["a.low imports a.high"]
    assert list(room_violations(upward, {"a": ("high", "low")})) == []
    around = plant(
        tmp_path / "b",
        **(files | {"a__top": "import headrace.a.high.y"}),
        a__low__x="import headrace.a.top",
        a__high__w="import headrace.a.low.x",
    )
    assert len(list(room_violations(around, order))) == 1
    without = list(room_violations(plant(tmp_path / "c", **files, a__low__x=""), {}))
    assert without == ["a has the rooms ['high', 'low'], and ROOMS []"]


def test_order_checker_sees_the_file_that_is_not_named(tmp_path):
    package = plant(tmp_path / "a", room__f0="", room__f1="")
    (package / "room" / "__init__.py").write_text('"""Read `f0.py`, then `f1.py`."""')
    assert list(unordered(package)) == []
    plant(package, room__more="")
    assert list(unordered(package)) == ["room/__init__.py does not say when to read more.py"]


def test_name_checker_sees_classes_and_files_of_one_name(tmp_path):
    package = plant(
        tmp_path,
        **{
            "one__batch": "class Batch: ...\nclass _Own: ...\n",
            "two__batch": "class _Own: ...\n",
            "two__config": "class Batch: ...\n",
            "one__config": "def batch(): ...\n",
        },
    )
    assert list(names_used_twice(package)) == [
        "Batch: one/batch.py, two/config.py",
        "batch.py: one/batch.py, two/batch.py",
    ]


def test_budget_checker_counts(tmp_path):
    body = "    pass\n"
    package = plant(
        tmp_path,
        long_file="x = 1\n" * 701,
        long_function="def f():\n" + body * 60,
        fits="def f():\n" + body * 59,
    )
    assert sorted(budget_violations(package)) == [
        "long_file has 701 lines",
        "long_function.f has 61 lines",
    ]


def test_offer_checker_counts_what_others_import(tmp_path):
    names = [f"f{number}" for number in range(13)]
    functions = "".join(f"def {name}(): ...\n" for name in names)
    package = plant(
        tmp_path,
        **{
            "crowded": functions,
            "seen__whole": functions.replace("def f0()", "class f0:\n    def own(self)"),
            "private": functions,
            "words": "".join(f"{name.upper()} = 1\nclass {name}:\n    x: int\n" for name in names),
            "user": "".join(f"from headrace.{one} import {', '.join(names)}\n" for one in ("crowded", "words"))
            + f"from headrace.seen import whole as seen\n{', '.join(f'seen.{name}' for name in names)}\n"
            + f"from headrace.private import {', '.join(names[1:])}\n",
        },
    )
    assert sorted(crowded_modules(package, {})) == [
        "crowded offers 13 functions and classes to others",
        "seen.whole offers 13 functions and classes to others",
    ]
    assert list(crowded_modules(package, {"crowded": "", "seen.whole": ""})) == []


def test_import_checker_counts_modules_and_not_names(tmp_path):
    parts = {f"part{number}": "x = y = 1\n" for number in range(26)}
    lines = [f"from headrace.{name} import x, y\n" for name in parts]
    package = plant(tmp_path, **parts, whole="".join(lines), most="".join(lines[1:]))
    assert list(importing_modules(package, {})) == ["whole imports 26 of our modules"]
    assert list(importing_modules(package, {"whole": ""})) == []


def test_small_checker_asks_for_two_importers_or_a_reason(tmp_path):
    package = plant(
        tmp_path,
        room__small="",
        room__shared="",
        room__kind="",
        one="import headrace.room.small\nfrom headrace.room import shared\n" + "x = 1\n" * 80,
        other="from headrace.room.shared import x\nKINDS = {'kind': \"headrace.room.kind:KIND\"}\n" + "x = 1\n" * 78,
    )
    assert list(small_modules(package, ())) == ["room.small has 0 lines and 1 importers"]
    assert list(small_modules(package, ("room.smaller",))) == ["room.small has 0 lines and 1 importers"]
    assert list(small_modules(package, ("room",))) == []


def test_concrete_checker_sees_every_way_of_naming(tmp_path):
    package = plant(
        tmp_path,
        a="from headrace.engine.native.core import NativeEngine",
        b="import headrace.engine as e\ne.NativeEngine()",
        engine__native="class NativeEngine: ...\nNativeEngine()",
        run__build="from headrace.engine.native import NativeEngine",
    )
    assert list(concrete_names(package, {"NativeEngine": "engine"})) == [
        "a.py names NativeEngine",
        "b.py names NativeEngine",
    ]


WAYS = (
    "print('x')",
    "sys.stderr.write('x')",
    "traceback.print_exc()",
    "from traceback import print_exc",
    "os.write(2, b'x')",
    "sys.exit(f'headrace: {error}')",
    "from rich.console import Console",
    "from rich.console import Console as Screen",
    "import rich.console\nrich.console.Console()",
    "from rich.console import Console as RichConsole\nRichConsole()",
    "from rich.text import Text",
    "from rich import print",
    "from rich.markup import escape",
    "Text.from_markup('[red]x')",
    "console.print('[red]x', markup=True)",
    "Panel(body, title=name)",
    "console.status(f'{name} ...')",
    "open(1, 'w')",
    "raise SystemExit(f'no {name}')",
    "logging.basicConfig()",
)


@pytest.mark.parametrize("way", WAYS)
def test_print_checker_sees_every_way_to_the_terminal(tmp_path, way):
    assert len(list(prints_elsewhere(plant(tmp_path, a=way)))) == 1


def test_print_checker_lets_pass_what_is_no_way_to_the_terminal(tmp_path):
    free = "def f():\n    print('x')"
    package = plant(
        tmp_path, core__printing=free, views__screen__console=free, episodes__sandbox__inside__solution=free
    )
    quiet = "os.write(pipe, b'x')\nsys.exit(1)\nfrom rich.console import Console as RichConsole, Group\n"
    plant(package, quiet=f"{quiet}Panel(body, title=Text(name))\nfile.write('x')\necho('x')\nSpinner('dots')\n")
    assert list(prints_elsewhere(package)) == []


def test_door_checker_sees_the_config_and_what_hides_it(tmp_path):
    named = plant(tmp_path / "a", serve__x="def f(config: 'RunConfig'): ...", run__x="def f(config: RunConfig): ...")
    assert list(settings_past_the_door(named)) == ["serve.x names RunConfig"]
    hidden = plant(
        tmp_path / "b", loop__x="def f(algo: Any, way: Any, other: Any): ...", testing__x="def f(config: Any): ..."
    )
    assert list(settings_past_the_door(hidden)) == ["loop.x takes algo as Any", "loop.x takes way as Any"]


def test_counter_sees_whoever_takes_the_config(tmp_path):
    taking = "def f(config: RunConfig): ...\ndef g(*, c: 'RunConfig | None'): ...\ndef h(c: RunConfigs, d): ...\n"
    package = plant(
        tmp_path, run__x=taking + "class A:\n    config: RunConfig\n    def i(self, c: Opt[RunConfig]): ...\n"
    )
    assert sorted(takers_of_the_config(package)) == ["run.x.f", "run.x.g", "run.x.i"]


def test_loop_checker_reads_the_docstrings_of_what_is_started(tmp_path):
    message = "Consumes: a\n\n    Waits for: b\n\n    Unblocked by: c"
    package = plant(
        tmp_path,
        starts="group.create_task(self.mute(1))\nasyncio.ensure_future(whole())",
        loops=f'async def mute(self): """Consumes: a"""\nasync def whole(): """{message}"""\nasync def other(): ...\n',
    )
    assert list(silent_loops(package)) == ["mute does not say: Waits for: ", "mute does not say: Unblocked by: "]


def test_call_checker_counts_what_is_passed_by_position(tmp_path):
    package = plant(
        tmp_path,
        six="f(1, 2, 3, 4, 5, 6)",
        starred="x.f(1, 2, *three, 4, 5, 6)",
        five="f(1, 2, 3, 4, *five, name=6, other=7)",
        shape="torch.zeros(1, 2, 3, 4, 5, 6)",
    )
    assert list(long_calls(package)) == [
        "six.py:1 passes 6 values by position to f",
        "starred.py:1 passes 6 values by position to x.f",
    ]


def test_definition_checker_counts_what_may_be_passed_by_position(tmp_path):
    six = "".join(f"    {name}: int = 0\n" for name in "abcdef")
    package = plant(
        tmp_path,
        classes=f"@dataclass\nclass Six:\n{six}@dataclass(frozen=True)\nclass Frozen:\n{six}"
        f"@dataclass(kw_only=True)\nclass Named:\n{six}@dataclass\nclass Half:\n    _: KW_ONLY\n{six}class Plain:\n{six}"
        f"@dataclass\nclass Five:\n    count: ClassVar[int] = 0\n    own: int = field(init=False)\n{six.replace('    f: int = 0', '')}"
        f"@dataclass(kw_only=True)\nclass Mixed:\n{six.replace('= 0', '= field(kw_only=False)')}",
        functions="def f(a, b, c, d, e, f): ...\nasync def g(a, b, c, d, e, f=1): ...\ndef h(a, b, c, d, *, e, f): ...\n"
        "class C:\n    def six(self, a, b, c, d, e, f): ...\n    def five(self, a, b, c, d, e): ...\n"
        "class Op(torch.autograd.Function):\n    def forward(ctx, a, b, c, d, e, f): ...\n",
    )
    assert list(long_definitions(package)) == [
        "classes.py Six",
        "classes.py Frozen",
        "classes.py Mixed",
        "functions.py C.six",
        "functions.py f",
        "functions.py g",
    ]


def test_docstring_checker_reads_modules_classes_functions_and_fields(tmp_path):
    package = plant(
        tmp_path,
        dangling='"""What it holds."""\nclass C:\n    """Of a run."""\n    x: int\n    """By ticket: its rows."""\n'
        '    def f(self):\n        """In place, scales it."""\n',
        leaning='A = 1\n"""The same, of rows."""\nB = 2\n"""Those of rows."""\nC = 3\n"""It counts."""\n',
        alone='def f():\n    """Whether it counts."""\nclass C:\n    """Its rows."""\n    x: int\n    """Its first row."""\n',
        plain='"""The rows."""\ndef f():\n    """Information about it."""\n    return "For you."\n',
    )
    assert sorted(dangling_docstrings(package)) == [
        "alone.py:2 begins with Whether it",
        "alone.py:4 begins with Its",
        "dangling.py:1 begins with What",
        "dangling.py:3 begins with Of",
        "dangling.py:5 begins with By",
        "dangling.py:7 begins with In",
        "leaning.py:2 begins with The same",
        "leaning.py:4 begins with Those",
        "leaning.py:6 begins with It",
    ]
