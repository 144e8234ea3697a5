"""Weight sync over HTTP. Read `http_ranges.py` (both ends), then `unprepared.py` (the end of a server that was started before the run)."""
