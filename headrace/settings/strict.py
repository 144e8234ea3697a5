"""The rules of every table of settings, so that a new setting has them too."""

from __future__ import annotations

from pydantic import ConfigDict

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""No unknown name, and no number that is not finite. Integers and floats are bounded where a table is read (`toml.build`)."""

LONGEST_NAME = 100
"""Characters of a name that names files: a file's name has at most 255 bytes, and a run appends to it."""
