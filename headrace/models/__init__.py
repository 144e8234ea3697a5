"""Models as files: where they come from and what belongs to them. Nothing here runs a model.

Read `resolve.py` (a name becomes a directory: the table of known models, and the files that a directory must hold), `tokenizer.py` (loads one;
end-of-sequence tokens), `chat.py` (messages and tokens) with `control_tokens.py` (a special token's text in data stays text), `lora.py`
(settings of adapters), `grammars.py` (languages that completions are held to), `saved_buffers.py` (weights that are no parameters), `expert_choice.py` (the experts that a
mixture's layers choose), `vllm_names.py` (the same parameters in vLLM).

Models that see: `images.py` (what an image is, and the numbers that stand for it among tokens), `vision.py` (takes such a model apart, and makes
the features of images), `image_embedding.py` (these features beside the embedding), `image_axes.py` (what Qwen's families need beside them: places on
three axes, and features for further layers), `image_blocks.py` (what Gemma's need: tokens of an image that see each other).
"""
