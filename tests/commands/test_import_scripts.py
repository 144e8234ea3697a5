"""Scripts of a shell as `headrace import` reads them, beside the shell itself: each override has the value that the command gets, or is said to be unknown."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.commands.importing.given import UNKNOWN, read_given
from headrace.core.errors import ConfigError

SETTINGS = ("a.b", "c.d", "e.f")
NAMES = st.sampled_from("ABC")
PLAIN = st.sampled_from(["1", "x", "1e-6", "True", "", "a/b", "0.5", "010", "off"])
TEXTS = st.one_of(
    PLAIN,
    NAMES.map("${}".format),
    st.tuples(NAMES, st.sampled_from([":-", "-"]), PLAIN).map(lambda part: f"${{{''.join(part)}}}"),
    st.tuples(NAMES, NAMES).map(lambda two: f"${two[0]}_${{{two[1]}}}"),
)
VALUES = st.one_of(
    TEXTS, TEXTS.map('"{}"'.format), PLAIN.map("'{}'".format), NAMES.map("'${}'".format), NAMES.map("\\${}".format)
)
ASSIGNED = st.tuples(st.sampled_from(["", "export "]), NAMES, VALUES).map(lambda it: f"{it[0]}{it[1]}={it[2]}")
ADDED = st.tuples(NAMES, VALUES).map("+=".join)
SET = st.one_of(ASSIGNED, ASSIGNED, ADDED)
OVERRIDES = st.tuples(st.sampled_from(SETTINGS), VALUES).map("=".join)
STATEMENTS = st.one_of(
    SET,
    st.tuples(NAMES, SET, SET).map(lambda it: f'if [ "${it[0]}" = x ]; then\n  {it[1]}\nelse\n  {it[2]}\nfi'),
    st.tuples(NAMES, SET).map(lambda it: f'[ -z "${it[0]}" ] && {it[1]}'),
    st.tuples(st.sampled_from("+ "), st.lists(OVERRIDES, max_size=2)).map(
        lambda it: f"D{it[0].strip()}=(\n  {' '.join(it[1])}\n  $E\n)"
    ),
    OVERRIDES.map(lambda it: f'D=("${{D[@]}}" {it})'),
    st.tuples(NAMES, OVERRIDES).map(lambda it: f'[ "${it[0]}" = x ] && D+=({it[1]})'),
    st.lists(OVERRIDES, max_size=2).map(lambda it: f'E="{" ".join(it).translate(str.maketrans("", "", QUOTES))}"'),
    st.just("# it isn't a.b=9"),
)
QUOTES = "'\"\\"
COMMANDS = st.tuples(
    st.lists(OVERRIDES, min_size=1, max_size=3), st.sampled_from(["", "${D[@]}", '"${D[@]}"', "$E", "${D[@]} \\\n  $E"])
).map(lambda it: f"python -m x {' '.join(it[0])} {it[1]} c.d=7")
SCRIPTS = st.tuples(st.lists(STATEMENTS, max_size=6), COMMANDS).map(lambda it: "\n".join([*it[0], it[1], ""]))

SHELL = 'python() { printf "%s\\0" "$@"; }; source "$0"'


def as_run(script: Path) -> dict[str, str]:
    """The overrides that the command gets, the last one of each name."""
    done = subprocess.run(["env", "-i", "/bin/bash", "-c", SHELL, str(script)], capture_output=True, check=False)
    words = done.stdout.decode().split("\0")
    return dict(word.split("=", 1) for word in words if word.startswith(SETTINGS) and "=" in word)


@settings(max_examples=60)
@given(text=SCRIPTS)
def test_a_script_is_read_as_the_shell_reads_it(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    directory = tmp_path_factory.mktemp("script")
    (script := directory / "run.sh").write_text(text)
    (plain := directory / "plain.sh").write_text(
        "python x " + " ".join(f"{name}='{value}'" for name, value in as_run(script).items())
    )
    found, meant = read_given(script), read_given(plain)
    for name, value in meant.items():
        known: Any = found.get(name, UNKNOWN if any(word.startswith("$") for word in found) else None)
        assert known is UNKNOWN or (known, type(known)) == (value, type(value)), f"{name} is {value!r}"


def test_an_array_that_is_set_to_its_own_words_and_more_has_both(tmp_path: Path) -> None:
    script = 'A=(a.b=1)\nA=("${A[@]}" c.d=2)\npython -m x "${A[@]}"\n'
    (path := tmp_path / "run.sh").write_text(script)
    assert read_given(path) == {"a.b": 1, "c.d": 2}


ANCHORS = ", ".join(
    f"{name}: &{name} {{p: *{before}, q: *{before}}}"
    for before, name in zip("ABCDEFGHIJKLMNOPQRSTUV", "BCDEFGHIJKLMNOPQRSTUVW", strict=True)
)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("X=0123456789\n" + "X=$X$X\n" * 40 + "python -m x a.b=$X\n", None),
        ("X=0123456789\n" + "X=$X$X$(date)\n" * 40 + "python -m x a.b=$X\n", None),
        (
            "A=(a.b=1 c.d=2)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + 'python -m x "${A[@]}"\n',
            "its array A has more than",
        ),
        ("python -m x a.b='{A: &A {p: 1, q: 2}, " + ANCHORS + "}'\n", "its anchors are repeated"),
        ("python -m x a.b=1 " + "$((" * 20_000 + "\n", None),
        ("python -m x a.b=1 " + "a." * 100_000 + "\n", None),
        ("python -m x a.b=2024-13-01\n", None),
    ],
    ids=["variable", "partly known", "array", "anchors", "arithmetic", "dots", "date"],
)
def test_a_script_that_grows_without_end_is_read_or_refused_at_once(
    tmp_path: Path, script: str, said: str | None
) -> None:
    (path := tmp_path / "run.sh").write_text(script)
    if said is None:
        assert "a.b" in read_given(path)
    else:
        with pytest.raises(ConfigError, match=said):
            read_given(path)
