from __future__ import annotations

from support.shapes import shapes_are_checked

__all__ = ["shapes_are_checked"]
