"""The fake vLLM server over the real engine, in a process of its own: python vllm_server.py MODEL PORT LOGS [FAULT ...]"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from headrace.engine.config import EngineConfig
from headrace.serve.config import ServeConfig
from headrace.serve.fake_vllm import FakeVllm
from headrace.serve.start import bind, make_server, opened

LORAS = 2


async def main(model: str, port: str, logs: str, *faults: str) -> None:
    sock = bind("127.0.0.1", int(port))
    engine = EngineConfig(kv_gib=0.01, context_length=65, max_running=16, dtype="float32", max_adapters=LORAS)
    async with opened(ServeConfig(model=model, engine=engine), Path(model), Path(logs)) as serving:
        await make_server(FakeVllm(serving, max_loras=LORAS, faults=faults).app()).serve(sockets=[sock])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
