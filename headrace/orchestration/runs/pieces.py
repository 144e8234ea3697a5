"""Tokens of a run as text, one by one, with the model's own tokenizer where it is on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import model_states
from headrace.observe.numbers.rollout_view import Pieces, settings_of

_WINDOW = 8
"""Tokens that are decoded together: some are written otherwise at a beginning."""


def pieces_of(run_dir: Path) -> Pieces | None:
    """The text of each token, by the run's tokenizer; None where it is not on this machine. Fetches nothing."""
    model = settings_of(run_dir).get("model")
    directory = _on_this_machine(str(model.get("path", ""))) if isinstance(model, dict) else None
    if directory is None:
        return None
    try:
        encoder = ChatEncoder(directory)
    except HeadraceError:
        return None
    words = {number: word for word, number in encoder.vocabulary().items()}
    return lambda tokens: split_text(tokens, encoder.decode, lambda token: words.get(token, f"<{token}>"))


def _on_this_machine(path: str) -> Path | None:
    if path and Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    ready = {one.model.name: one.path for one in model_states() if one.state == "ready"}
    if path in ready:
        return ready[path]
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, local_files_only=True))
    except Exception:  # the hub client raises errors of many libraries; whatever it was, it is not here
        return None


def split_text(tokens: Iterable[int], decode: Callable[[Sequence[int]], str], word: Callable[[int], str]) -> list[str]:
    """The text that each token adds. A character made of several tokens goes to the last of them; what decodes to nothing (a
    special token) is shown by its name, `word`."""
    pieces: list[str] = []
    window: list[int] = []
    shown = ""  # of the window
    for token in tokens:
        if not decode([token]):
            pieces.append(word(token))
            window, shown = [], ""
            continue
        window.append(token)
        text = decode(window)
        if text.endswith("\ufffd"):  # a character that is not whole yet
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        window = window[-_WINDOW:]  # some tokens decode otherwise at a beginning
        shown = decode(window)
    if window and (rest := decode(window)[len(shown) :]):
        pieces[-1] = rest
    return pieces
