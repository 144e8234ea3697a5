"""The fake SGLang server over the real engine, in a process of its own.

python sglang_server.py MODEL PORT [FAULT ...]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from headrace.engine.config import EngineConfig
from headrace.serve.config import ServeConfig
from headrace.serve.fakes.fake_sglang import FakeSglang
from headrace.serve.start import bind, make_server, opened


async def main(model: str, port: str, *faults: str) -> None:
    sock = bind("127.0.0.1", int(port))
    engine = EngineConfig(kv_gib=0.01, context_length=64, dtype="float32", max_adapters=2)
    with tempfile.TemporaryDirectory() as logs:
        async with opened(ServeConfig(model=model, engine=engine), Path(model), Path(logs)) as serving:
            server = FakeSglang(serving, faults=faults, enable_lora=True, max_loras_per_batch=2, enable_metrics=True)
            await make_server(server.app()).serve(sockets=[sock])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
