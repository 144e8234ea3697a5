"""The dialects. Read `headrace.py` (`headrace serve`, which reports everything), then `vllm.py` and `sglang.py` (servers that label their weights), each
with the facts about a server; vLLM also has checksums of its weights.
"""
