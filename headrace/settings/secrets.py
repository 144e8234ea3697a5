"""Tokens from files and environment variables: arguments and settings are seen by others, and stand in a run's directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from headrace.core.errors import ConfigError

GATEWAY = "HEADRACE_GATEWAY"
"""The environment variable with the address at which a run hands out its rollouts."""

WEBHOOK = "HEADRACE_WEBHOOK"
"""The environment variable with the address to which messages about a run go: whoever knows it may post there."""

OWN = (GATEWAY, WEBHOOK, "HEADRACE_TOKEN")
"""Environment variables that open doors of a run or of its people. Programs of the user's do not get them."""


def read_token(path: Path, setting: str) -> str:
    """Raises ConfigError for a file that cannot be read, is empty, or that others may read. `setting`: where it was named."""
    try:
        token = path.read_text(encoding="utf-8").strip()
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} {path} cannot be read: {error}") from None
    if os.name == "posix" and mode & 0o077:
        raise ConfigError(f"{setting} {path} may be read by others (mode {mode:o}); chmod 600 {path}")
    return check_token(token, f"{setting} {path}")


def check_token(token: str, where: str) -> str:
    """Returns the token. Raises ConfigError if it cannot be one. `where`: its place, for the message, which never holds the token."""
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise ConfigError(f"{where} must hold one token: a line of ASCII without spaces (openssl rand -hex 32)")
    return token
