"""Weight sync over HTTP: engines fetch from a server in the trainer's process, and from each other.

    GET  /weights/NAME/FINGERPRINT/PART     NAME: the adapter's, `-` for the model; PART: full, delta, or manifest (of any version).
                                            `Range: bytes=N-` goes on from byte N. 307 names an engine that has the version and sends it
    POST /weights/NAME/FINGERPRINT          the sender of this request has the version, and serves it at the port in the body

A server sends to `FANOUT` engines at a time; others wait until one of these has the version, and are sent to it. So n engines need
about log2(n) times the seconds of one, whoever they are. Every request carries the run's token.

Over TLS the server shows one certificate, which engines know beforehand, and trust no other. They have no certificates, so that they do not
serve each other then.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import math
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, unquote, urlsplit

import msgspec

from headrace.core.errors import IdentityError
from headrace.core.weights import Manifest, WeightUpdate
from headrace.web.limits import Crowd, Guest
from headrace.weight_sync.fetching import RelayingReceiver, SecuredTransport
from headrace.weight_sync.relays import Relays
from headrace.weight_sync.slots import LONGEST_MANIFEST, Manifests, Shelves, send_all

if TYPE_CHECKING:
    import torch

    from headrace.weight_sync.fetching import OfferedVersion, OfferingSender


PATIENCE = 60.0
"""Seconds in which nothing arrives until a connection counts as broken, and for which a server lets an engine wait for its turn."""


def path_to(name: str, fingerprint: str) -> str:
    return f"/weights/{quote(name, safe='') or '-'}/{fingerprint}"


OTHERS = 15.0
"""Seconds for which another engine may be silent; then the trainer is asked."""
AT_ONCE = 256
"""Connections that a server serves at a time. One that has not shown the token makes room for a further one; if all have, that is closed."""
TRIES = 3
"""Connections in a row that may break without a byte."""


class Http(SecuredTransport, frozen=True, tag="http"):
    """Protocol `Transport`."""

    words: ClassVar = "HTTP"
    about: ClassVar = "they fetch from it and from each other"
    reaches: ClassVar = frozenset({"child", "rollout host", "fetching server"})
    keeps_for_sleepers: ClassVar = frozenset({"fetching server"})

    @staticmethod
    def copies(engines: int, delta: bool = False) -> int:
        """Whoever has it sends to two at a time. Differences are sent by the trainer alone."""
        return engines if delta else min(engines, 2 * math.ceil(math.log(engines + 1, 3) - 1e-9))

    def sender(self, manifests: Manifests, once: Collection[str] = ()) -> OfferingSender:
        from headrace.weight_sync.fetching import OfferingSender, Offers

        offers = Offers(manifests, once, self.encoding)
        server = WeightServer(offers, self.host, self.token, self.tls.serving() if self.tls else None)

        def where(name: str, offer: OfferedVersion) -> dict[str, Any]:
            server.tree.forget(path_to(name, offer.fingerprint), path_to(name, ""))
            return {"url": server.url}

        return OfferingSender(offers, where)

    def receiver(self, manifests: Manifests) -> HttpReceiver:
        return HttpReceiver(manifests, self.token, self.tls.trusting() if self.tls else None)


# -- a server -----------------------------------------------------------------------------------------------------------------


class WeightServer(socketserver.ThreadingTCPServer):
    """Answers in threads, beside the work of its process."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, shelves: Shelves, host: str, token: str, tls: ssl.SSLContext | None = None) -> None:
        """Raises OSError if it cannot listen at that address."""
        self.shelves, self.token, self.tree, self._tls = shelves, token, Relays(), tls
        self._crowd, self._guests, self._lock = Crowd(AT_ONCE, AT_ONCE), dict[Any, Guest](), threading.Lock()
        """The connections, by the addresses at their other ends."""
        super().__init__((host, 0), _Handler)
        self.port = int(self.server_address[1])
        self.url = f"http{'s' if tls else ''}://{host}:{self.port}"
        threading.Thread(target=self.serve_forever, name="weights", daemon=True).start()

    @property
    def is_encrypted(self) -> bool:
        return self._tls is not None

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            guest = self._guests[client_address] = self._crowd.came(lambda: _end(request))
        if guest.here:
            super().process_request(request, client_address)
        else:
            self._left(client_address)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._left(client_address)

    def asked(self, client_address: Any) -> None:
        """Whoever is at that address has shown the token."""
        with self._lock:
            self._crowd.asked(self._guests[client_address])

    def _left(self, client_address: Any) -> None:
        with self._lock:
            self._crowd.left(self._guests.pop(client_address))

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(PATIENCE)
        with self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as secured:
            with self._lock:
                self._guests[client_address].leave = lambda: _end(secured)
            secured.do_handshake()
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: the engine at the other end reports it."""


class _Handler(BaseHTTPRequestHandler):
    server: WeightServer
    timeout = PATIENCE

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def parse_request(self) -> bool:
        """Refuses whoever does not know the token, whatever they ask for."""
        if not super().parse_request():
            return False
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            self.server.asked(self.client_address)
            return True
        self._answer(401)
        self.close_connection = True
        return False

    def do_GET(self) -> None:
        try:
            name, fingerprint, part = _asked(self.path, 3)
            first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        except ValueError:
            self._answer(400)
            return
        if part == "manifest":
            manifest = self.server.shelves.manifests.get(name)
            found = memoryview(msgspec.json.encode(manifest)) if manifest else None
        else:
            found = self.server.shelves.find(name, fingerprint, "delta" if part == "delta" else "full")
        if found is None:
            self._answer(404)
        elif part in ("manifest", "delta"):
            self._answer(200, len(found))
            send_all(self.connection, found)
        elif not 0 <= first < found.nbytes:
            self._answer(416)
        else:
            total = {"Content-Range": f"bytes {first}-{found.nbytes - 1}/{found.nbytes}"}
            direct = "Direct" in self.headers or self.server.is_encrypted
            turn = self.server.tree.turn(path_to(name, fingerprint), seconds=PATIENCE / 2)
            with nullcontext("") if direct else turn as other:
                if other:
                    self._answer(307, 0, {"Location": other})
                    return
                self._answer(206, found.nbytes - first, total)
                send_all(self.connection, found[first:])

    def do_POST(self) -> None:
        try:
            name, fingerprint = _asked(self.path, 2)
            port = int(self.rfile.read(min(5, int(self.headers.get("Content-Length", "0")))))
        except ValueError:
            self._answer(400)
            return
        self.server.tree.joined(path_to(name, fingerprint), f"http://{self.client_address[0]}:{port}")
        self._answer(204)  # when it is so: whoever asks next is sent there

    def _answer(self, status: int, nbytes: int = 0, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(nbytes), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()


def _end(connection: socket.socket) -> None:
    """Ends a connection that another thread reads."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _asked(path: str, count: int) -> list[str]:
    """Raises ValueError for a path that has not so many parts below /weights."""
    empty, weights, *parts = path.split("/")
    if empty or weights != "weights" or len(parts) != count:
        raise ValueError(path)
    return ["" if parts[0] == "-" else unquote(parts[0]), *parts[1:]]


# -- the engine's end ---------------------------------------------------------------------------------------------------------


class HttpSource:
    """Protocol `RelayedSource`."""

    def __init__(self, token: str, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: trusts the certificate of the trainer's server; None: nothing is encrypted."""
        self._token, self._tls = token, tls
        self.here = ""
        """The address at which this machine reached the trainer."""
        self.others = 0
        self.direct = False

    def full(self, update: WeightUpdate, manifest: Manifest, into: memoryview) -> int:
        root, path, at, failures = str(update.where["url"]), _path_of(update), 0, 0
        url, direct = root, self.direct
        while at < len(into):
            more = {"Range": f"bytes={at}-", **({"Direct": "1"} if direct else {})}
            try:
                with self._asked(
                    url, "GET", f"{path}/full", more, patience=PATIENCE if url == root else OTHERS
                ) as answer:
                    if answer.status == 307:
                        url = answer.headers["Location"]
                        continue
                    if answer.status == 206:
                        _check_length(answer, update, len(into))
                        at, before = _read_into(answer, into, at), at
                        self.others += url != root
                        failures = failures if at == before else 0
                    if at < len(into):
                        raise ConnectionError(f"answer {answer.status}, {len(into) - at} bytes too early")
            except (OSError, http.client.HTTPException) as error:
                failures += 1
                if failures == TRIES or (url == root and "answer 404" in str(error)):
                    raise _unreachable(update, root, error) from error
                if url == root:
                    time.sleep(0.2 * failures)
                url, direct = root, True
        return len(into)

    def delta(self, update: WeightUpdate, limit: int) -> bytes:
        url = str(update.where["url"])
        return self._read(update, url, f"{_path_of(update)}/delta", limit)

    def manifest(self, update: WeightUpdate) -> Manifest:
        """Returns the layout of an update that the engine was not prepared for."""
        path = f"{_path_of(update)}/manifest"
        return msgspec.json.decode(self._read(update, str(update.where["url"]), path, LONGEST_MANIFEST), type=Manifest)

    def announce(self, update: WeightUpdate, port: int) -> None:
        """Tells the trainer that this engine has the version. If that fails, others fetch from the trainer."""
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            self._asked(str(update.where["url"]), "POST", _path_of(update), {}, body=str(port)),
        ):
            pass

    def _read(self, update: WeightUpdate, url: str, path: str, limit: int) -> bytes:
        try:
            with self._asked(url, "GET", path, {}) as answer:
                body = answer.read(limit + 1)
                if answer.status != 200 or len(body) > limit or answer.length:
                    raise ConnectionError(f"answer {answer.status} with {len(body)} bytes")
                return body
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(update, url, error) from error

    @contextmanager
    def _asked(
        self,
        url: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        body: str | None = None,
        patience: float = PATIENCE,
    ) -> Iterator[http.client.HTTPResponse]:
        place = urlsplit(url)
        if (place.scheme == "https") != (self._tls is not None):
            raise ConnectionError(
                f"{url} is {'' if self._tls is None else 'not '}encrypted, and no such server was to be expected"
            )
        there = place.hostname or "", place.port
        connection = (
            http.client.HTTPSConnection(*there, timeout=patience, context=self._tls)
            if self._tls
            else http.client.HTTPConnection(*there, timeout=patience)
        )
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {self._token}", **headers})
            self.here = self.here or connection.sock.getsockname()[0]
            yield connection.getresponse()
        finally:
            connection.close()


def _path_of(update: WeightUpdate) -> str:
    return path_to(update.adapter.name if update.adapter else "", update.fingerprint)


def _check_length(answer: http.client.HTTPResponse, update: WeightUpdate, wanted: int) -> None:
    length = answer.headers.get("Content-Range", "").rpartition("/")[2]
    if length != str(wanted):
        raise IdentityError(f"version {update.version} has {length or 'no'} bytes, and this engine's weights {wanted}")


def _read_into(answer: http.client.HTTPResponse, into: memoryview, at: int) -> int:
    """Returns where the bytes end that have arrived, however the connection ended."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        while at < len(into) and (got := answer.readinto(into[at:])):
            at += got
    return at


def _unreachable(update: WeightUpdate, url: str, error: Exception) -> IdentityError:
    return IdentityError(
        f"weights of version {update.version}, published with fingerprint {update.fingerprint}, could not be fetched from the trainer at "
        f"{url} ({error}). The engine keeps the version that it has"
    )


class HttpReceiver(RelayingReceiver):
    """Protocol `WeightReceiver`, and a server of what it has received."""

    def __init__(self, manifests: Manifests, token: str, tls: ssl.SSLContext | None = None) -> None:
        self._token, self._http, self._encrypted = token, HttpSource(token, tls), tls is not None
        super().__init__(manifests, self._http)
        self._server: WeightServer | None = None

    @property
    def serves(self) -> bool:
        """Whether this engine listens for other engines."""
        return self._server is not None

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        tensors = super().receive(update)
        if self._encrypted:
            return tensors
        if self._server is None:
            self._server = WeightServer(self, self._http.here, self._token)
        self._http.announce(update, self._server.port)
        return tensors

    def close(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()
