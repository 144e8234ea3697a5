"""Loads a user's own function by `path/to/file.py:name`, and formats the errors that user code raises."""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.core.errors import ConfigError, encodable
from headrace.version import PACKAGE


def load_function(
    spec: str, what: str, modules: dict[Path, ModuleType] | None = None, *, arguments: int = 0
) -> Callable[..., Any]:
    """Returns the function. `what`: the setting that names it, for messages. A file that is already in `modules` is not run again.
    `arguments`: how many, one or two, it has to take; 0 for any number.

    Raises ConfigError if the file or the function is missing, takes no such number of arguments, or running the file fails."""
    modules = {} if modules is None else modules
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if path not in modules:
        modules[path] = _run(path, what)
    names = [known for known in vars(modules[path]) if not known.startswith("_")]
    if not hasattr(modules[path], name):
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; it defines {', '.join(names) or 'nothing'}"
        raise ConfigError(f"{what}: {path.name} defines no {name}{hint}")
    function: Callable[..., Any] = getattr(modules[path], name)
    try:
        if arguments:
            inspect.signature(function).bind(*[None] * arguments)
    except TypeError as error:
        raise ConfigError(f"{what}: {name} cannot be called with {_MANY[arguments]}: {error}") from None
    return function


def defines(spec: str) -> str:
    """Returns an empty string, or why `file.py:name` cannot be a function of that file. The file is parsed, not run."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})" if path.exists() else f"there is no file {path}"
    except (SyntaxError, ValueError) as error:
        return f"{path} is not valid Python: {error}"
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    names = {found for node in ast.walk(tree) for found in _bound(node)}
    if name in names or imported:
        return ""
    near = difflib.get_close_matches(name, names, n=1)
    return f"{path.name} defines no {name}{f'; did you mean {near[0]}?' if near else ''}"


def _bound(node: ast.AST) -> list[str]:
    """Returns the names that a statement binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [alias.asname or alias.name for alias in names]
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
    return []


def _run(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {path}")
    found = importlib.util.spec_from_file_location(f"headrace_user_{path.stem}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    _PLACES.add(path.parent)
    sys.modules[found.name] = module  # dataclasses and pickle look up their module there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # at the end: a random.py beside the file must not shadow Python's own
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"{what}: {error.msg} ({error.filename}:{error.lineno})") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: running the file failed: {one_line(error)}") from None
    _refuse_modules_of_others(path, what)
    return module


def _refuse_modules_of_others(path: Path, what: str) -> None:
    """Raises ConfigError if the file imports a module that lies beside it, and was given one of the same name that lies beside another file of the
    user's: Python has one module of a name in a process."""
    for name in _imported(_nodes_of(path)):
        given = getattr(sys.modules.get(name), "__file__", None)
        place = Path(given).resolve().parent if given else path.parent
        beside = [own for own in (path.parent / f"{name}.py", path.parent / name / "__init__.py") if own.exists()]
        if beside and not {place, place.parent} & {path.parent} and {place, place.parent} & _PLACES:
            raise ConfigError(
                f"{what}: {path} imports {name}, which is {beside[0]}, and a process has one module of a name: it has {given} already, which "
                "another file imports; rename one of the two modules"
            )


def code_behind(path: Path) -> list[Path]:
    """Returns the Python files that a file of the user's leads to, `MOST_FILES` at most: those whose absolute paths stand in its texts, and those that it imports from beside it, which
    may lead to others."""
    found, waiting = {path}, [path]
    while waiting and len(found) < MOST_FILES:
        others = sorted(_led_to_by(waiting.pop(0), path.parent) - found)
        found.update(others)
        waiting += others
    return sorted(found - {path})


def _led_to_by(path: Path, root: Path) -> set[Path]:
    """`root`: the directory in which a process looks for modules of the user's."""
    nodes = _nodes_of(path)
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = {Path(text) for text in texts if text.startswith("/") and text.endswith(".py") and os.path.isfile(text)}
    for node in nodes if "site-packages" not in root.parts else ():
        match node:
            case ast.Import(names=names):
                named |= {file for alias in names for file in _files_of(root, alias.name.split("."))}
            case ast.ImportFrom(module=module, names=names, level=level):
                base = path.parents[level - 1] if 0 < level <= len(path.parents) else root
                parts = module.split(".") if module else []
                named |= {file for alias in names for file in _files_of(base, [*parts, alias.name])}
    return named


def packages_behind(files: Iterable[Path]) -> dict[str, str]:
    """Returns the versions of the installed packages that files of the user's import, by name; `+cpu` and `+cu130` are builds of one version. A module
    that several packages share (`google`) says nothing about either."""
    found = {}
    for name in sorted(_modules_of_others(files)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # not installed, or under another name (`yaml` of PyYAML)
            if len(packages := set(_packages().get(name, ()))) == 1:
                found[min(packages)] = importlib.metadata.version(min(packages))
    return {name: str(version).partition("+")[0] for name, version in found.items() if name != "headrace"}


@cache
def _packages() -> Mapping[str, list[str]]:
    """The installed packages by the modules that they have: half a second of work."""
    return importlib.metadata.packages_distributions()


def _modules_of_others(files: Iterable[Path]) -> set[str]:
    """The modules that files import, those of Python and those beside them left out."""
    found: set[str] = set()
    for path in files:
        found |= {name for name in _imported(_nodes_of(path)) if not any(_files_of(path.parent, [name]))}
    return found - sys.stdlib_module_names


def _nodes_of(path: Path) -> list[ast.AST]:
    """Returns the parts of a file's code; none of one that cannot be read, which says so where it is run."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of the user's code, which says them itself when it is run
            return list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _imported(nodes: Sequence[ast.AST]) -> set[str]:
    """Returns the first names of the modules that code imports, without those that it names from its own place (`from . import`)."""
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in names}


def _files_of(base: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yields the files that an import of a module runs, as far as they lie in a directory."""
    for end in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:end])
        yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


def one_line(error: BaseException) -> str:
    """Formats an error as `ZeroDivisionError: division by zero (rewards.py:12)`; the place is the last one in the file that headrace
    called."""
    outside = _outside(error)
    theirs = [frame for frame in outside if frame.filename == outside[0].filename]
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return f"{_headline(error)}{place}"


def traceback_of(error: BaseException) -> str:
    """Returns the traceback as Python prints it, without the frames of headrace, of the standard library and of installed packages;
    its last line is like `KeyError: 'b'`. If no frame is the user's, it has the last two outside headrace."""
    outside = _outside(error)
    theirs = [frame for frame in outside if not frame.filename.startswith(_LIBRARIES)] or outside[-2:]
    lines = traceback.format_list(traceback.StackSummary.from_list(theirs[-_FRAMES:]))
    return "".join(["Traceback (your frames):\n", *lines, _headline(error)])


def said_by(error: BaseException) -> str:
    """Returns the text of an error, whatever its `__str__` does."""
    try:
        return str(error)
    except Exception as other:
        return f"its text cannot be had ({type(other).__name__})"


def unreachable(error: BaseException) -> bool:
    """Returns whether the error means that something on the network did not answer, judged by the names of its classes, because each
    client library has its own."""
    return any(kind.__name__ in _UNREACHABLE for kind in type(error).__mro__)


def _outside(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith((_PACKAGE, "<frozen"))]


def _headline(error: BaseException) -> str:
    message = (said_by(error).strip().splitlines() or [""])[0][:300]
    return encodable(f"{type(error).__name__}{': ' if message else ''}{message}")


_MANY = {1: "one argument", 2: "two arguments"}
MOST_FILES = 100
"""Files that one of the user's leads to."""
_PLACES: set[Path] = set()
"""The directories of files that were run."""
_PACKAGE = str(PACKAGE)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_FRAMES = 8
_UNREACHABLE = (
    "ConnectionError", "TimeoutError", "Timeout", "URLError", "gaierror", "TransportError", "ClientConnectionError",
    "APIConnectionError",
)  # fmt: skip
"""Names of such classes in Python, requests, urllib, httpx, aiohttp and the clients of services."""
