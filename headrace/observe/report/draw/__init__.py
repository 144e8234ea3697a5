"""SVG and HTML without a library. Read `axes.py` (scales and ticks), `svg.py` (marks), `tables.py`."""
