"""The way of new weights to an engine: what steps of AdamW change, what a difference costs and saves, and every transport in both encodings.

    python benchmarks/weight_sync.py [MODEL] [--rates 1e-6 1e-5 1e-4] [--rounds 5]
    python benchmarks/weight_sync.py --values 67e6        the second table alone, over random values of which 2 % change

First, for each learning rate: steps of AdamW (float32 weights, gradients of real text in bfloat16 autocast) from the model's own weights; the
difference of the last two versions in bfloat16. Then, for each transport and encoding, both ends in this process: versions are published and
received in turn, and beside each the same bytes are copied plainly, and sent from one bare socket to another over the loopback (send and
recv_into: no protocol, no fingerprint). Seconds are medians of CPU time of this process (all threads), except where the clock is
named.
"""

from __future__ import annotations

import argparse
import gc
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoTokenizer

from headrace.core.protocols import Transport
from headrace.core.weights import Manifest
from headrace.models.resolve import resolve_model
from headrace.trainer.model.causal_lm import load_model
from headrace.web.tls import TlsIdentity, first_certificate
from headrace.weight_sync.cuda_ipc import CudaIpc
from headrace.weight_sync.delta.codec import apply, encode
from headrace.weight_sync.kind import Encoding, Opening
from headrace.weight_sync.packed import PackedBuffer, lay_out
from headrace.weight_sync.slots import Slots, anonymous_memory, send_all
from headrace.weight_sync.tcp import Tcp
from headrace.weight_sync.transport import TRANSPORTS

TEXT = sorted(Path(__file__).parent.parent.glob("docs/*.md"))
Image = dict[str, torch.Tensor]


def steps(directory: Path, rate: float, count: int, keep: int) -> Iterator[Image]:
    """Yields the served weights after each of the last `keep` steps of `count`."""
    torch.manual_seed(0)
    model = load_model(directory, torch.device("cpu")).float().train()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "\n".join(path.read_text() for path in TEXT)
    tokens = torch.tensor(tokenizer(text[:200_000])["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(count):
        rows = torch.stack([tokens[start : start + 128] for start in torch.randint(0, len(tokens) - 128, (4,))])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= count - keep:
            yield {name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}


def median(work: Callable[[], Any], rounds: int, clock: Callable[[], float] = time.process_time) -> float:
    found = []
    for _ in range(rounds + 1):
        began = clock()
        work()
        found.append(clock() - began)
    return statistics.median(found[1:])  # the first touches new pages


def packed(image: Image) -> tuple[memoryview, PackedBuffer]:
    manifest = lay_out(image.items(), torch.bfloat16)
    buffer = memoryview(bytearray(manifest.nbytes))
    whole = PackedBuffer(manifest, buffer)
    whole.fill(image.items())
    return buffer, whole


def encodings(directory: Path, rates: list[float], count: int, rounds: int) -> list[Image]:
    """Prints the first table. Returns the last versions at the second rate, for the second table."""
    print(
        "| learning rate | values changed | full, MB | difference, MB | times fewer | encode, ms | apply, ms | saved bytes at 1 GB/s, ms |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    kept: list[Image] = []
    for rate in rates:
        images = list(steps(directory, rate, count, 3))
        if not kept or rate == 1e-5:
            kept = images
        (before, _), (now, whole) = packed(images[-2]), packed(images[-1])
        changed = np.mean(np.frombuffer(before, np.uint16) != np.frombuffer(now, np.uint16))
        delta = encode(before, now, 2, len(now))
        assert delta is not None
        encoding = median(lambda: encode(before, now, 2, len(now)), rounds)  # noqa: B023
        made = memoryview(bytearray(before))
        applying = median(lambda: apply(made, delta), rounds)  # noqa: B023
        made[:] = before
        apply(made, delta)
        assert made == now and whole.fingerprint() == PackedBuffer(whole._manifest, made).fingerprint()
        size = whole._manifest.payload
        print(
            f"| {rate:g} | {100 * changed:.2f} % | {size / 1e6:.0f} | {len(delta) / 1e6:.2f} | {size / len(delta):.0f} | "
            f"{1e3 * encoding:.0f} | {1e3 * applying:.0f} | {(size - len(delta)) / 1e6:.0f} |",
            flush=True,
        )
    return kept


class Loopback:
    """Two connected sockets, and memory at both ends."""

    def __init__(self, nbytes: int) -> None:
        manifests = {"": Manifest((), nbytes)}
        self._source, self._target = (Slots(anonymous_memory(), manifests, [""]) for _ in range(2))
        for slots in (self._source, self._target):
            np.frombuffer(slots.buffer("", 0), np.uint8)[:] = 1
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self._one = socket.create_connection(listening.getsockname())
            self._other, _ = listening.accept()

    def carry(self) -> None:
        sending = threading.Thread(target=send_all, args=(self._one, self._source.buffer("", 0)))
        sending.start()
        into, at = self._target.buffer("", 0), 0
        while at < len(into):
            at += self._other.recv_into(into[at:])
        sending.join()


def made_up(values: int, share: float = 0.02) -> list[Image]:
    """Three versions of random values in bfloat16, of which a share changes by one unit in the last place from one to the next."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randn(values, generator=generator).bfloat16().view(torch.int16)
    images = []
    for _ in range(3):
        bits = bits ^ (torch.rand(values, generator=generator) < share).short()
        images.append({"weight": bits.view(torch.bfloat16)})
    return images


def ways(images: list[Image], rounds: int) -> None:
    print(
        "\n| transport | encoding | MB | send, ms | fetch, ms | verify, ms | plain copy, ms | bare loopback, ms | fetch / copy | fetch / loopback | the same by the clock |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in (*TRANSPORTS, TLS):
            for encoding in ("full", "delta"):
                if kind not in ("shared_memory", "cuda_ipc") or encoding == "full":
                    way(images, kind, encoding, rounds, opened(kind, encoding, Path(folder)))
                    gc.collect()


TLS = "tcp over TLS"


def opened(kind: str, encoding: str, folder: Path) -> Transport:
    """`cuda_ipc` is the CPU's stand-in."""
    form = Encoding(encoding == "delta", 1 << 30)
    if kind == "cuda_ipc":
        return CudaIpc("cpu")
    if kind != TLS:
        return TRANSPORTS[kind].open(Opening(form=form))
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=run"]
    subprocess.run([*made, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return msgspec.structs.replace(
        Tcp.open(Opening(form=form)), tls=TlsIdentity(first_certificate(cert), str(cert), str(key))
    )


def way(images: list[Image], kind: str, encoding: str, rounds: int, transport: Transport) -> None:
    """One row. Both ends work one after the other, so that each is timed alone."""
    manifests = {"": lay_out(images[0].items(), torch.bfloat16)}
    sender, receiver = transport.sender(manifests), transport.receiver(manifests)
    source, target = (np.ones(manifests[""].nbytes, np.uint8) for _ in range(2))
    found: dict[str, list[float]] = {
        name: [] for name in ("send", "receive", "verify", "copy", "bare", "clock", "carried", "hashed")
    }
    loopback = Loopback(manifests[""].nbytes)
    travelled = 0
    for version in range(2 * rounds + 3):
        now, then = time.process_time, time.perf_counter
        began = now()
        update = sender.send(version, images[version % len(images)].items())
        sent, then_sent, before = now(), then(), receiver.received
        views = receiver.receive(update)
        received, then_received = now(), then()
        del views
        np.copyto(target, source)
        copied, then_copied = now(), then()
        loopback.carry()
        carried, then_carried = now(), then()
        receiver.receive(update)  # held already: only verified
        verified, then_verified = now(), then()
        if version < 3:  # new pages; and the first difference follows a full copy
            continue
        travelled = receiver.received - before
        for name, value in {
            "send": sent - began,
            "receive": received - sent,
            "copy": copied - received,
            "bare": carried - copied,
            "verify": verified - carried,
            "clock": then_received - then_sent,
            "carried": then_carried - then_copied,
            "hashed": then_verified - then_carried,
        }.items():
            found[name].append(value)
    transport.close()
    middle = {name: statistics.median(values) for name, values in found.items()}
    fetch, fetch_clock = middle["receive"] - middle["verify"], middle["clock"] - middle["hashed"]
    print(
        f"| {kind} | {encoding} | {travelled / 1e6:.2f} | {1e3 * middle['send']:.0f} | {1e3 * fetch:.0f} | {1e3 * middle['verify']:.0f} | "
        f"{1e3 * middle['copy']:.0f} | {1e3 * middle['bare']:.0f} | {fetch / middle['copy']:.2f} | {fetch / middle['bare']:.2f} | "
        f"{fetch_clock / middle['carried']:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--values", type=float)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.values:
        ways(made_up(int(options.values)), options.rounds)
    else:
        ways(
            encodings(Path(resolve_model(options.model)), options.rates, options.steps, options.rounds), options.rounds
        )


if __name__ == "__main__":
    main()
