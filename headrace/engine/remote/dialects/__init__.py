"""The dialects. Read `headrace.py` (`headrace serve`, which reports everything), `labelled.py` (the common part of servers that label their
weights), then `vllm.py` with `vllm_facts.py` (facts about a vLLM server) and `vllm_checksums.py` (whether it runs the weights that it was given), and
`sglang.py` with `sglang_facts.py`."""
