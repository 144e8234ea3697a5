"""`headrace export --push`: the card and its picture, and the upload by the hub's own client to a fake of its API."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import shutil
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fake_hub import TOKEN, FakeHub, fake_hub

import headrace
from headrace import cli
from headrace.commands.publishing.model_card import HEIGHT, LINE, WIDTH, curve_picture
from headrace.core.errors import ConfigError
from headrace.run.run_directory import LOCK
from support.runs.beside import until
from support.tiny_run import tiny_config


@pytest.fixture(scope="module")
def run(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pushed")
    config = tiny_config(directory, tiny_llama, train={"steps": 2}, eval={"prompts": 4}, watch={"identity_every": 0})
    return headrace.train(config).directory


@pytest.fixture
def export(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    def call(hub: FakeHub, *words: str, token: str = TOKEN, run: Path = run) -> tuple[int, str]:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_TOKEN", token)
        # the fake has the protocol of git-lfs; the client reads its variable for it when it is imported
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        code = cli.main(["export", str(run), *words])
        out, err = capsys.readouterr()
        return code, out + err

    return call


def front_matter(card: str) -> tuple[dict[str, Any], str]:
    _, head, body = card.split("---\n", 2)
    return yaml.safe_load(head), body


def test_a_model_is_uploaded_with_a_card_made_from_the_run(
    run: Path, tiny_llama: Path, tmp_path: Path, export: Callable[..., tuple[int, str]]
) -> None:
    with fake_hub() as hub:
        code, out = export(hub, "--push", "org/sums", "--private", "--dtype", "float32")
        assert code == 0 and f"{hub.address}/org/sums/commit/{1:040x}" in out, out
        files = hub.files["org/sums"]
        assert hub.private == {"org/sums": True} and hub.messages == [
            f"Step 2 of a run with headrace {headrace.__version__}"
        ]
        code, out = export(hub, "--push", "org/sums")  # the repository is there already
        assert code == 0 and len(hub.messages) == 2, out
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "reward.png"} <= set(files)
    head, card = front_matter(files["README.md"].decode())
    assert head["library_name"] == "transformers" and "base_model" not in head
    assert head["tags"] == ["headrace", "reinforcement-learning", "grpo"]
    for words in ("# sums", "2 optimizer steps of grpo on `rows.jsonl`", "`share_of_e`, weight 1", "16 of them were held out", "learning_rate = 0.01",
                  "| held-out reward, last |", f"headrace {headrace.__version__}, torch ", "Accounting", "✓ Lag"):  # fmt: skip
        assert words in card, words
    everything = b"".join(files[name] for name in files if not name.endswith((".safetensors", "png")))
    assert str(run.parent.parent).encode() not in everything and str(tiny_llama).encode() not in everything
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_token_that_may_not_write_is_said_with_the_remedy(
    tmp_path: Path, export: Callable[..., tuple[int, str]]
) -> None:
    with fake_hub() as hub:
        code, out = export(hub, "--push", "org/sums", "--to", str(tmp_path / "kept"), token="hf_another_one")
    assert code == 1 and "org/sums was not uploaded" in out and "hf auth login" in out, out
    assert (tmp_path / "kept" / "model.safetensors").is_file()


@pytest.mark.slow
def test_an_adapter_names_its_base_and_no_directory(
    tiny_llama: Path, tmp_path: Path, export: Callable[..., tuple[int, str]]
) -> None:
    config = tiny_config(tmp_path, tiny_llama, train={"steps": 1}, lora={"rank": 4}, watch={"identity_every": 0})
    run = headrace.train(config).directory
    with fake_hub() as hub:
        code, out = export(hub, "--push", "org/adapter", "--to", str(tmp_path / "kept"), run=run)
        assert code == 0, out
        files = hub.files["org/adapter"]
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == tiny_llama.name
    assert json.loads((tmp_path / "kept" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tiny_llama
    )
    assert front_matter(files["README.md"].decode())[0]["library_name"] == "peft"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--to DIR says where to save"),
        (["--push", "sums"], "write the model's name as ORG/NAME"),
        (["--to", "x", "--private"], "--private belongs to --push"),
        (["--to", "x", "--format", "gguf"], "--format gguf writes a file: --to FILE.gguf"),
        (["--to", "x.gguf", "--format", "gguf", "--push", "org/x"], "--to FILE.gguf, without --push"),
        (
            ["--to", "x.gguf", "--format", "gguf"],
            "split text as GPT-2, SmolLM, Llama 3 or Qwen2 do, and this model's is another",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(run), *words]) == 2
    assert told in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_is_exported_as_a_file_for_llama_cpp(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    from gguf import GGUFReader
    from test_gguf import model_at

    config = tiny_config(
        tmp_path,
        model_at(tmp_path_factory.mktemp("bpe"), "llama"),
        train={"steps": 1},
        eval={"prompts": 2},
        watch={"identity_every": 0},
    )
    run = headrace.train(config).directory
    file = tmp_path / "files" / "one.gguf"
    assert cli.main(["export", str(run), "--format", "gguf", "--to", str(file)]) == 0
    assert f"{file}: step-000001, for llama.cpp (bfloat16)" in capsys.readouterr().out
    assert len(GGUFReader(file).tensors) == 21 and [one.name for one in file.parent.iterdir()] == ["one.gguf"]
    assert cli.main(["export", str(run), "--format", "gguf", "--to", str(file)]) == 2
    assert "exists; name another file" in capsys.readouterr().err


def pixels(png: bytes) -> np.ndarray:
    """Read without the writer's help: chunks, checksums, rows without a filter."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, size = 8, b"", (0, 0)
    while at < len(png):
        length, kind = struct.unpack(">I", png[at : at + 4])[0], png[at + 4 : at + 8]
        body = png[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + body) == struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0]
        size = struct.unpack(">II", body[:8]) if kind == b"IHDR" else size
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(size[1], 1 + 3 * size[0])
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(size[1], size[0], 3)


def test_the_picture_is_a_png_of_the_curve() -> None:
    found = pixels(curve_picture([(x, x / 10) for x in range(1, 11)], [(0.0, 0.2)]))
    assert found.shape == (HEIGHT, WIDTH, 3)
    rows, columns = np.nonzero((found == LINE).all(-1))
    heights = [rows[columns == column].mean() for column in sorted(set(columns))]
    assert columns.max() - columns.min() > WIDTH / 2 and rows.max() - rows.min() > HEIGHT / 2
    assert all(b < a + 1 for a, b in itertools.pairwise(heights)), "it rises, and so its rows fall"


def test_a_picture_of_nothing_and_of_gaps_is_drawn_too() -> None:
    assert pixels(curve_picture([])).shape == (HEIGHT, WIDTH, 3)
    assert (pixels(curve_picture([(1, 0.5), (2, math.nan), (3, 0.7)])) == LINE).all(-1).any()


def test_a_script_of_trl_uploads_what_it_trained(
    run: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.compat.trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        str(tmp_path / "out"), hub_model_id="org/sums", hub_private_repo=True, hub_token=TOKEN, push_to_hub=True
    )
    rows = [{"prompt": "1 + 1?"}]
    trainer = GRPOTrainer(model=str(tiny_llama), reward_funcs=len, args=args, train_dataset=rows)
    trainer.run = run
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        assert trainer.push_to_hub("the end", dataset_name="sums").startswith(f"{hub.address}/org/sums/commit/")
        assert hub.private == {"org/sums": True} and hub.messages[-1] == "the end"
        with pytest.raises(ConfigError, match="revision= cannot be honoured"):
            trainer.push_to_hub(revision="v2")
        with pytest.raises(TypeError, match="'data'"):
            trainer.push_to_hub(data="sums")
        assert {"model.safetensors", "README.md"} <= set(hub.files["org/sums"])


def test_each_checkpoint_is_exported_while_the_run_goes_on(
    run: Path, tmp_path: Path, export: Callable[..., tuple[int, str]]
) -> None:
    """A process that holds the lock stands for the run; its checkpoints are copies of those of one that was trained."""
    copy = tmp_path / "going_on"
    shutil.copytree(run, copy)
    (whole,) = (copy / "checkpoints").iterdir()
    later, gone = copy / "checkpoints" / "step-000004", b'"CheckpointSaved"'
    line = next(line for line in (copy / "metrics.jsonl").read_bytes().splitlines() if gone in line)
    to = tmp_path / "models"

    def go_on() -> None:
        until(lambda: (to / whole.name).is_dir())
        shutil.copytree(whole, tmp_path / "made")
        (tmp_path / "made").rename(later)
        facts = [line.replace(b'"step":2', b'"step":%d' % step) for step in (3, 4)]
        with (copy / "metrics.jsonl").open("ab") as metrics:
            metrics.write(b"\n".join(facts) + b"\n")
        until(lambda: (to / later.name).is_dir())
        lock.close()

    with fake_hub() as hub, ThreadPoolExecutor() as pool:
        lock = (copy / LOCK).open("ab")
        fcntl.flock(lock, fcntl.LOCK_EX)
        acting = pool.submit(go_on)
        code, out = export(hub, "--follow", "--to", str(to), "--push", "org/sums", run=copy)
        acting.result()
    assert all(f"org/sums/commit/{number:040x}" in out for number in (1, 2)), out
    assert sorted(path.name for path in to.iterdir()) == [whole.name, later.name]
    assert all((to / name / "model.safetensors").is_file() for name in (whole.name, later.name))
    assert code == 1 and "step 3 was removed before it was exported: a larger checkpoint.keep" in out, out


def test_what_a_hub_refuses_is_tried_again_and_a_directory_is_not_written_twice(
    run: Path, tmp_path: Path, export: Callable[..., tuple[int, str]]
) -> None:
    to = tmp_path / "models"
    with fake_hub() as hub:
        code, out = export(hub, "--follow", "--to", str(to), "--push", "org/sums", token="wrong")
        assert code == 1 and "hf auth login (or HF_TOKEN)" in out and not list(to.iterdir())
        code, out = export(hub, "--follow", "--to", str(to))
        (made,) = to.iterdir()
        assert code == 0 and str(made) in out
        written = made.stat().st_mtime_ns
        assert export(hub, "--follow", "--to", str(to))[0] == 0 and made.stat().st_mtime_ns == written
        (tmp_path / "file").write_text("")
        code, out = export(hub, "--follow", "--to", str(tmp_path / "file" / "models"))
        assert code == 1 and "Not a directory" in out and "Traceback" not in out
    code, out = export(hub, "--follow", "--to", str(to), "--step", "2")
    assert code == 2 and "leave --step and --format gguf out" in out
