"""Uploads an exported model to the Hugging Face hub, by its own client."""

from __future__ import annotations

import os
import re
from pathlib import Path

from headrace.core.errors import ConfigError, HeadraceError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_name(name: str) -> None:
    """Raises ConfigError for a name that no model can have."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"--push {name}: write the model's name as ORG/NAME, with your user name or an organisation of yours"
        )


def full_name(name: str, token: str | None = None) -> str:
    """Returns ORG/NAME: a name alone is that of a model of the token's user. Raises HeadraceError where the hub does not know the token."""
    from huggingface_hub import HfApi

    if "/" in name:
        return name
    try:
        return f"{HfApi(os.environ.get('HF_ENDPOINT')).whoami(token)['name']}/{name}"
    except Exception as error:  # the client raises errors of several libraries
        raise HeadraceError(
            f"the hub does not say whose {name} is to be ({type(error).__name__}): name it ORG/NAME, or hf auth login (or HF_TOKEN)"
        ) from error


def push(folder: Path, name: str, *, private: bool, message: str, token: str | None = None) -> str:
    """Makes the repository if there is none, and uploads the folder. Returns the address of the (last) commit.

    `token`: None: the client takes that of `hf auth login` or HF_TOKEN; and the address of the hub from HF_ENDPOINT. Raises HeadraceError."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    hub = HfApi(os.environ.get("HF_ENDPOINT"), token=token, library_name="headrace")
    try:
        hub.create_repo(name, private=private or None, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message).commit_url)
    except Exception as error:  # the client raises errors of several libraries
        code = getattr(getattr(error, "response", None), "status_code", 0)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        remedy = (
            "hf auth login (or HF_TOKEN) with a token that may write there"
            if code in (401, 403)
            else "try again: nothing is lost"
        )
        raise HeadraceError(f"{name} was not uploaded ({reason}): {remedy}") from error
