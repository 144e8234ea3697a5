"""The version of this package, and where it lies. Workers that connect over TCP compare versions with the controller's."""

from pathlib import Path

__version__ = "0.1.0"

PACKAGE = Path(__file__).resolve().parent
"""The folder `headrace`. What imports it in another process needs its parent on the path."""
