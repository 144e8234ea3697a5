"""A tiny random Llama with a character tokenizer and a chat template: a whole run on it takes seconds."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from headrace.processes.process_end import ending
from support import compiling
from support.runs import preloaded_python

gc.disable()  # until all tests are collected: see `pytest_collection_finish`

IN_MEMORY = Path("/dev/shm")
"""Tests write small files and flush each to the disk, as a run does: on a busy disk a flush takes 20 ms, here none."""

if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 4e9:  # a container may have 64 MB there
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

pytest.register_assert_rewrite("support.native_calls", "support.trainer_calls")
preloaded_python.share_with_runs()
FULL = "full"
"""The profile of `make test-slow`, in which properties are tested with all examples."""

# No deadline: machines are up to ten times slower than others. The usual suite draws the same examples each time, so that whoever changes
# something is refused for what they changed; `make test-slow` draws fresh ones.
hypothesis.settings.register_profile("headrace", deadline=None, derandomize=True)
hypothesis.settings.register_profile(FULL, deadline=None)
hypothesis.settings.load_profile("headrace")


def pytest_configure(config: pytest.Config) -> None:
    """No server that the usual suite asks is outside it. Each client of HTTP reads all certificates of the machine otherwise, 20 ms of CPU time."""
    if config.option.markexpr == "not slow":
        import certifi

        first, _, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----")
        one = config.cache.mkdir("certificates") / "one.pem"
        one.write_text(first + "-----END CERTIFICATE-----\n")
        os.environ["SSL_CERT_FILE"] = str(one)


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    preloaded_python.share_with_workers_of_tests()
    compiling.compile_once(config, Path(__file__).parent)


DIED: list[str] = []
"""How workers of xdist have ended before they should."""


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Xdist names only the test in which a worker has died; the signal or the exit code tells more."""
    process = getattr(node.gateway._io, "popen", None)
    if error and process is not None:
        DIED.append(f"{node.gateway.id}, pid {process.pid}, {ending(process.wait(timeout=60))}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that wait come first: meanwhile others have the cores. At the end nobody would use them."""
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)
    if config.getoption("hypothesis_profile") != FULL:
        usual = [item for item in items if isinstance(item, pytest.Function) and not item.get_closest_marker("slow")]
        for test in {item.obj for item in usual if hypothesis.is_hypothesis_test(item.obj)}:
            _draw_fewer(test)


def _draw_fewer(test: Any) -> None:
    """Lets a property be tested with a quarter of its examples."""
    settings = test._hypothesis_internal_use_settings
    fewer = max(settings.max_examples // 4, min(settings.max_examples, 2))
    test._hypothesis_internal_use_settings = hypothesis.settings(settings, max_examples=fewer)


def pytest_collection_finish() -> None:
    """Modules and tests stay: nobody needs to look for garbage among them. As in a worker (`run/worker/worker.py`)."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # a test leaves little, and is short
    gc.enable()


DEAR = 3.0
"""Seconds of CPU time from which a test is slow, or `whole`: the one that shows a whole behaviour."""


def _cpu_seconds() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class Logged(logging.Handler):
    """What a test logs. Pytest's own plugin goes through all loggers six times a test, and libraries have thousands (1.6 ms a test)."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


LOGGED = Logged()
logging.getLogger().addHandler(LOGGED)


@pytest.fixture
def logged() -> Logged:
    """What this test has logged, from warnings on."""
    return LOGGED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = _cpu_seconds()
    LOGGED.lines = []
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu", _cpu_seconds() - before))
        item.add_report_section("call", "log", LOGGED.text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what the suite costs, and which tests should be cheaper. Nothing fails of it: machines differ, and others may be busy on this one."""
    found = [
        (dict(report.user_properties).get("cpu", 0.0), report.nodeid)
        for report in terminalreporter.stats.get("passed", ())
        if report.when == "call" and not {"slow", "whole"} & set(report.keywords)
    ]
    if found:
        terminalreporter.write_line(f"{_cpu_seconds():.0f} s of CPU time")
    for how in DIED:
        terminalreporter.write_line(how)
    for seconds, name in sorted(found, reverse=True):
        if seconds > DEAR:
            terminalreporter.write_line(
                f"{seconds:5.1f} s of CPU time: {name}: make it cheaper, or mark it slow or whole"
            )


CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-=?.,:\n"
SPECIAL = ["<unk>", "<s>", "<end>", "<user>", "<assistant>", "<system>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tokenizer(directory: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "<end>", "bos_token": "<s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tokenizer of `tiny_llama`, without a model: it costs no torch."""
    directory = tmp_path_factory.mktemp("tiny-tokenizer")
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that `transformers` loads: 2 layers, hidden 32, grouped-query attention, tied embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)
    return directory
