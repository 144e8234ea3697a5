"""Reading of settings; `run/config.py` lists them.

Read `strict.py` (the rules of every table), `toml.py` (text to dataclasses and back, with a sentence for each mistake), `other_names.py` (the names that other libraries give
to a setting), `paths.py` (relative paths), `process_config.py` (checkpoints, evaluation, deadlines), `user_code.py` (functions
named in a config), `extras.py` (packages that only some settings need, here or in another interpreter).
Tokens come from files: `secrets.py`.
"""
