"""Weight sync over HTTP. Read `http_ranges.py` (both ends) with `relays.py` (engines that send to others), then `unprepared.py` (the end of a server that was
started before the run)."""
