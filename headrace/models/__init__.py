"""Models as files: where they come from and what belongs to them. Nothing here runs a model.

Read `resolve.py` (a name becomes a directory) with `known_models.py` (the table) and `model_files.py` (the files of a directory);
`tokenizer.py` (loads one), `chat.py` (messages and tokens) with `control_tokens.py` (a special token's text in data stays text), `endings.py`
(end-of-sequence tokens), `lora.py` (settings of adapters), `grammars.py` (languages that completions are held to), `vllm_names.py` (the same parameters in vLLM).
"""
