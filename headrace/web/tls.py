"""TLS for connections that are not HTTP: the contexts of both ends, and a plain socket at the end of a TLS connection.

Threads may not read and write one `ssl.SSLSocket` at the same time (OpenSSL: "an SSL object may not be used concurrently"), and workers do.
So a thread of its own runs the TLS connection in an event loop, and relays its bytes to a socket pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from concurrent.futures import Future
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.types import Struct

_PIECE = 1 << 18
"""Bytes that are relayed at once."""


class TlsIdentity(Struct, frozen=True):
    """The certificate of a server whose clients trust it and no other."""

    certificate: str
    """PEM. It reaches the clients before they connect, over a connection that was checked."""
    cert_file: str
    key_file: str
    """The files on the server's machine."""

    def serving(self) -> ssl.SSLContext:
        """Raises ConfigError for files that cannot be used."""
        return server_context(Path(self.cert_file), Path(self.key_file))

    def trusting(self) -> ssl.SSLContext:
        return pinned_context(self.certificate)


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Returns the context of the listening end. Raises ConfigError for files that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate {cert} cannot be used with the key {key}: {error}") from None
    return context


def first_certificate(file: Path) -> str:
    """Returns the certificate (PEM) that a server shows: the first of its file, before those that signed it. Raises ConfigError."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        _, found, rest = file.read_text(encoding="ascii").partition(begin)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the certificate {file} cannot be read: {error}") from None
    if not found or end not in rest:
        raise ConfigError(f"{file} holds no certificate (PEM)")
    return begin + rest.partition(end)[0] + end + "\n"


def pinned_context(certificate: str) -> ssl.SSLContext:
    """Returns the context of the connecting end for a server that shows exactly this certificate (PEM). Its name is not compared: whoever
    has the key of this certificate is the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not have signed itself
    context.load_verify_locations(cadata=certificate)
    return context


def connect_over_tls(where: tuple[str, int], ca: str, seconds: float) -> socket.socket:
    """Returns a plain socket whose bytes travel over TLS. Blocks until the other end's certificate was checked: `ca` signed it, and it is
    for that host. Raises OSError if nothing listens there or the certificate is another, ConfigError for a file that holds none."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ca {ca} holds no certificates: {error}") from None
    ours, theirs = socket.socketpair()
    begun: Future[None] = Future()
    threading.Thread(target=lambda: asyncio.run(_relay(theirs, where, context, begun)), name="tls", daemon=True).start()
    try:
        begun.result(seconds)
    except BaseException:
        ours.close()
        raise
    ours.settimeout(seconds)
    return ours


async def _relay(plain: socket.socket, where: tuple[str, int], context: ssl.SSLContext, begun: Future[None]) -> None:
    try:
        reader, writer = await asyncio.open_connection(*where, ssl=context, limit=_PIECE)
    except BaseException as error:
        plain.close()
        begun.set_exception(error)
        return
    inner_reader, inner_writer = await asyncio.open_connection(sock=plain, limit=_PIECE)
    begun.set_result(None)
    both = [
        asyncio.ensure_future(_copy(reader, inner_writer)),
        asyncio.ensure_future(_copy(inner_reader, writer)),
    ]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    for end in (writer, inner_writer):  # each end is told of the other's end
        with contextlib.suppress(OSError, TimeoutError):
            end.close()
            async with asyncio.timeout(1.0):
                await end.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()
