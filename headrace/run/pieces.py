"""The text of each token of a run, by the model's tokenizer if that is on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.facts.kept_settings import settings_of
from headrace.facts.rollout_view import Pieces
from headrace.models.chat import ChatEncoder
from headrace.models.resolve import hub_model, model_states

_WINDOW = 8
"""Number of tokens that are decoded together, because some tokens decode differently at the start of a text."""


def pieces_of(run_dir: Path) -> Pieces | None:
    """A function that returns the text of each token; None if the run's tokenizer is not on this machine. Downloads nothing."""
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
    ready = {model_state.model.name: model_state.path for model_state in model_states() if model_state.state == "ready"}
    if path in ready:
        return ready[path]
    try:
        from huggingface_hub import snapshot_download

        hub = hub_model(path)
        return Path(snapshot_download(hub.repo, revision=hub.revision or None, local_files_only=True)) if hub else None
    except Exception:  # the hub client raises errors of many libraries; in any case the model is not here
        return None


def split_text(tokens: Iterable[int], decode: Callable[[Sequence[int]], str], word: Callable[[int], str]) -> list[str]:
    """The text that each token adds. A character that consists of several tokens belongs to the last of them. A token that decodes to
    nothing (a special token) is shown by its name, `word`."""
    pieces: list[str] = []
    window: list[int] = []
    shown = ""  # the text of the window
    for token in tokens:
        if not decode([token]):
            pieces.append(word(token))
            window, shown = [], ""
            continue
        window.append(token)
        text = decode(window)
        if text.endswith("\ufffd"):  # an incomplete character
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        window = window[-_WINDOW:]
        shown = decode(window)
    if window and (rest := decode(window)[len(shown) :]):
        pieces[-1] = rest
    return pieces
