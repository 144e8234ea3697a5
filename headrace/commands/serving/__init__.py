"""Commands that serve over HTTP. Read `serve.py` (the engine, and new weights into it) and `board_command.py` (all runs in the browser)."""
