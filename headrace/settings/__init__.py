"""How settings are read; `config.py` says which there are.

Read `toml.py` (text to dataclasses and back, with sentences for what is wrong), `other_names.py` (what other libraries call a
setting), `process_config.py` (checkpoints, evaluation, patience), `user_code.py` (functions named in a config), `extras.py`
(packages that only some settings need).
"""
