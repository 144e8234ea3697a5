"""`headrace import FILE` writes the settings of another library's config as a config of headrace.

Read `given.py` (a file of another library as names and values), `translation.py` (what a library's rules make of them), then `verl.py` and `prime_rl.py` (the rules: a library
is its file and one line in `import_command.py`).
"""
