"""vLLM's end of weight sync, which runs in vLLM's processes. Read `register.py` (the entry point), then `transfer_engine.py` (which needs vLLM),
`receiving.py` (by which way), `read_back.py` (by what its modules multiply), and `adapter_files.py` (an adapter as vLLM loads it)."""
