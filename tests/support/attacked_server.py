"""`headrace serve` over the engine without a model, in a process of its own that may open few files: MODEL."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from served import faked

from headrace.engine.fake import FakeEngine


async def main() -> None:
    engine = FakeEngine(seconds_per_token=5.0, length=lambda rng: 10_000, context_length=100_000)
    async with faked(Path(sys.argv[1]), engine) as (client, _):
        print(client.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
