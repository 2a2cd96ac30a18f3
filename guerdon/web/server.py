"""A server of this machine: which connections it keeps, and whose requests it answers."""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import socket
import time
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock, Thread
from typing import Any, Self

from guerdon.core.errors import ConfigError
from guerdon.web.connection import Answer, Connection, HttpError, Request, hang_up

log = logging.getLogger("guerdon")

TOKEN_HEADER = "X-Guerdon-Token"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@/\[\]]+)(:\d{1,5})?", re.IGNORECASE)


def is_loopback(name: str) -> bool:
    """Whether only this machine can reach an address."""
    address = _address(name)
    return name.lower() == "localhost" if address is None else address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None


class WebServer(ThreadingMixIn, TCPServer):
    """Serves `respond` from a thread for each connection; `with` starts it and ends it.

    Args:
        host: address to listen on.
        port: 0 takes a free one.
        name: for the log.
        pages: whether browsers may come, to this server's own pages; otherwise programs alone.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    max_connections = 32
    max_body_bytes = 64 * 1024
    request_seconds = 10.0
    """For a whole request to arrive, and for an answer to be taken."""
    idle_seconds = 120.0
    """For the next request on a connection that had one."""

    def __init__(self, host: str, port: int, *, name: str, pages: bool) -> None:
        self.name, self.pages = name, pages
        self.token = secrets.token_urlsafe(32)
        """What the server's own pages send along in `TOKEN_HEADER` when they change something."""
        self._host = host
        self._open: dict[socket.socket, float | None] = {}
        """Connection -> since when we wait for a request of it; None while one is answered."""
        self._lock = Lock()
        self._thread: Thread | None = None
        try:
            super().__init__((host, port), Connection)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error

    def respond(self, request: Request) -> Answer | None:
        """Answer a request, or hang up without an answer (None).

        Raises:
            HttpError: it is refused; any other GuerdonError is refused with 400.
        """
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Where it can be reached, without a slash at the end."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    # Running

    def start(self) -> Self:
        """Serve from a thread."""
        self._thread = Thread(target=self.serve_forever, args=(0.05,), daemon=True, name=self.name)
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the thread and close all connections."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
            self._thread = None
        self.server_close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:  # kept-alive ones would go on answering
            hang_up(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is not worth a traceback."""
        log.debug("%s: a connection from %s broke off", self.name, client_address, exc_info=True)

    # Connections

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, or refuse it if all are busy."""
        with self._lock:
            refused = len(self._open) >= self.max_connections and not self._make_room()
            if not refused:
                self._open[request] = time.monotonic()
        if refused:
            log.warning("%s: %d connections are busy; another one was refused", self.name, len(self._open))
            request.setblocking(False)  # a full buffer must not stop the others
            error = Answer.of_json({"error": "too many connections are busy: try again"}, 503)
            request.send(error.head(close=True) + error.body)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def _make_room(self) -> bool:
        """Close the connection that we have waited for longest; whether there was one."""
        waiting = {item: since for item, since in self._open.items() if since is not None}
        if not waiting:
            return False
        oldest = min(waiting, key=waiting.__getitem__)
        del self._open[oldest]
        hang_up(oldest)  # its thread ends by that
        return True

    def note_waiting(self, connection: socket.socket, waiting: bool) -> None:
        """Whether a connection has nothing to be answered at the moment."""
        with self._lock:
            if connection in self._open:
                self._open[connection] = time.monotonic() if waiting else None

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    # Who may ask

    def check_caller(self, headers: Any, method: str) -> None:
        """HttpError 403 unless the request was meant for this server and comes from where it may."""
        names = headers.get_all("Host", [])
        if len(names) != 1:
            raise HttpError(400, "a request needs one Host header")
        host = names[0].strip().lower()
        if not self._is_own_name(host):
            raise HttpError(403, f"Host {host[:80]!r} is not this server: use {self.url}")
        origins, site = headers.get_all("Origin", []), headers.get("Sec-Fetch-Site")
        if not self.pages and (origins or site not in (None, "none")):
            raise HttpError(403, "web pages may not use this server")
        if any(origin.strip().lower() != f"http://{host}" for origin in origins):
            raise HttpError(403, f"pages of {origins[0][:80]!r} may not use this server")
        if site not in (None, "none", "same-origin"):
            raise HttpError(403, "pages of other sites may not use this server")
        if self.pages and method != "GET":
            token = headers.get(TOKEN_HEADER, "")
            if not secrets.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
                raise HttpError(403, f"the token in {TOKEN_HEADER} is missing or wrong: load the page again")

    def _is_own_name(self, host: str) -> bool:
        """Names can be pointed anywhere by whoever owns them; addresses and `localhost` cannot."""
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1]
        if is_loopback(name) or is_loopback(self._host):
            return is_loopback(name)
        return _address(name) is not None or name in (self._host.lower(), socket.gethostname().lower())
