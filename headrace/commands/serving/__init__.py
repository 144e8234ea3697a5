"""Commands that serve over HTTP: all runs in the browser, and the engine with new weights into it (`serving_commands.py`)."""
