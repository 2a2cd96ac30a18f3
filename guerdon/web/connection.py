"""One connection: strict JSON requests, read within limits of size and time, and an answer to each."""

from __future__ import annotations

import http
import io
import json
import logging
import math
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from guerdon.core.errors import GuerdonError

if TYPE_CHECKING:
    from guerdon.web.server import WebServer

log = logging.getLogger("guerdon")

MAX_HEAD_BYTES = 32 * 1024
_LINGER_SECONDS = 1.0
"""How long a body that nobody wants is read away: closing at once would destroy the answer on its way."""
MAX_DIGITS = 18
"""Of an integer in JSON: what fits into 64 bits."""


class HttpError(GuerdonError):
    """A request that is refused, with its status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client asks."""

    method: str
    """GET or POST."""
    path: str
    query: str
    content: dict[str, Any]
    """The JSON object in the body; empty without a body."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The response to a request."""

    body: bytes
    kind: str
    """Content type."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    def head(self, *, close: bool) -> bytes:
        """Status line and headers."""
        phrase = http.HTTPStatus(self.status).phrase
        fields = {
            "Content-Type": self.kind,
            "Content-Length": str(len(self.body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",  # no other page shows ours under its own buttons
            "Cross-Origin-Resource-Policy": "same-origin",
            **self.headers,
            **({"Connection": "close"} if close else {}),
        }
        lines = [f"HTTP/1.1 {self.status} {phrase}", *(f"{name}: {value}" for name, value in fields.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    @classmethod
    def of_text(cls, text: str, kind: str = "text/plain") -> Answer:
        """Words."""
        return cls(body=text.encode(), kind=f"{kind}; charset=utf-8")

    @classmethod
    def of_json(cls, value: Any, status: int = 200) -> Answer:
        """A JSON value; ValueError if it holds NaN or an infinity, which no other language would read."""
        body = json.dumps(value, allow_nan=False).encode()
        return cls(body=body, kind="application/json", status=status)


def read_json(text: bytes) -> dict[str, Any]:
    """The object in strict JSON; HttpError 400 for anything else, whatever the bytes."""
    try:
        value = json.loads(
            text.decode("utf-8"), parse_constant=_no_number, parse_float=_number, parse_int=_number
        )
    except RecursionError as error:
        raise HttpError(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise HttpError(400, f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise HttpError(400, f"the body must be a JSON object, not a {type(value).__name__}")
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _number(text: str) -> float:
    whole = text.lstrip("-").isdecimal()
    if len(text.lstrip("-")) > MAX_DIGITS if whole else not math.isfinite(float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return int(text) if whole else float(text)


def hang_up(connection: socket.socket) -> None:
    """End a connection at once, in whatever thread it is used."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("a connection was closed already: %s", error)


class _Reader(io.RawIOBase):
    """Bytes of a connection, until a deadline and a limit for a whole part of a request.

    A time-out of the socket alone starts again with every byte.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline, self.num_bytes, self._end = 0.0, 0, True

    def allow(self, seconds: float, num_bytes: int, *, end: bool = False) -> None:
        """From now on; `end` says whether the client may hang up there."""
        self._deadline, self.num_bytes, self._end = time.monotonic() + seconds, num_bytes, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0.0:
            raise TimeoutError("the request did not arrive in time")
        if self.num_bytes <= 0:
            raise HttpError(431, f"the head of a request must not exceed {MAX_HEAD_BYTES} bytes")
        self._connection.settimeout(left)
        count = self._connection.recv_into(memoryview(buffer)[: self.num_bytes])
        if not count and not self._end:
            raise ConnectionError("it hung up in the middle of a request")
        self.num_bytes -= count
        return count


class Connection(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: WebServer

    def setup(self) -> None:
        """Read through `_Reader`."""
        super().setup()
        self._reader = _Reader(self.connection)
        self.rfile = self._stream = io.BufferedReader(self._reader)
        self._first, self._unread = True, False

    def handle_one_request(self) -> None:
        """Read a request, check it, answer it."""
        server = self.server
        self.close_connection = True  # unless the request turns out well
        self.command, self.requestline, self.request_version, self.path = "", "", "HTTP/1.1", ""
        server.note_waiting(self.connection, True)
        wait = server.request_seconds if self._first else server.idle_seconds
        self._reader.allow(wait, MAX_HEAD_BYTES, end=True)
        try:
            if not self._stream.peek(1):
                return
        except (TimeoutError, ConnectionError) as error:
            log.debug("%s: %s sent nothing: %s", server.name, self.client_address, error)
            return
        self._unread = True
        try:
            answer = self._ask()
        except HttpError as error:
            answer = self._refuse(error.status, str(error))
        except GuerdonError as error:
            answer = self._refuse(400, f"{type(error).__name__}: {error}")
        except TimeoutError:
            answer = self._refuse(408, f"the request did not arrive in {server.request_seconds:g} s")
        except ConnectionError as error:
            log.debug("%s: %s broke off: %s", server.name, self.client_address, error)
            return
        except Exception as error:
            log.exception("%s: %s %s failed", server.name, self.command, self.path[:80])
            answer = self._refuse(500, f"{type(error).__name__}: {error}")
        if answer is None:
            hang_up(self.connection)
            self.close_connection, self._unread = True, False
            return
        self._first = False
        self._send(answer)

    def _ask(self) -> Answer | None:
        self._reader.allow(self.server.request_seconds, MAX_HEAD_BYTES)
        self.raw_requestline = self.rfile.readline(MAX_HEAD_BYTES)
        if not self.raw_requestline.endswith(b"\n"):
            raise HttpError(414, f"a request line must not exceed {MAX_HEAD_BYTES} bytes")
        if not self.parse_request():  # which calls send_error for all other faults
            raise HttpError(400, "the request line is empty")
        if self.command not in ("GET", "POST"):
            raise HttpError(405, f"only GET and POST are answered, not {self.command[:20]}")
        self.server.check_caller(self.headers, self.command)
        content = self._content()
        self._unread = False
        self.server.note_waiting(self.connection, False)
        path, _, query = self.path.partition("?")
        return self.server.respond(Request(method=self.command, path=path, query=query, content=content))

    def _content(self) -> dict[str, Any]:
        """The object in the body; empty if there is none."""
        lengths, most = self.headers.get_all("Content-Length", []), self.server.max_body_bytes
        if "Transfer-Encoding" in self.headers:
            raise HttpError(411, "a body needs a Content-Length; chunks are not read")
        if len(lengths) > 1 or any(re.fullmatch(r"[0-9]{1,15}", item.strip()) is None for item in lengths):
            raise HttpError(400, "Content-Length must be one whole number")
        length = int(lengths[0]) if lengths else 0
        if length > most:
            raise HttpError(413, f"a body must not exceed {most} bytes, and this one has {length}")
        if not length:
            return {}
        if self.headers.get_content_type() != "application/json" or "Content-Type" not in self.headers:
            raise HttpError(415, "a body must be application/json")
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._reader.num_bytes = length
        body = self.rfile.read(length)
        self._unread = False
        return read_json(body)

    def handle_expect_100(self) -> bool:
        """Later: a body that is refused must not be asked for."""
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class finds wrong with a request's head; unlike there, it is raised."""
        del explain
        self.close_connection = True
        raise HttpError(code, message or http.HTTPStatus(code).phrase)

    def _refuse(self, status: int, message: str) -> Answer:
        if self._unread:  # we do not know where the next request begins
            self.close_connection = True
        log.debug("%s: %r refused: %s", self.server.name, self.requestline[:80], message)
        return Answer.of_json({"error": message[:500]}, status)

    def _send(self, answer: Answer) -> None:
        self.connection.settimeout(self.server.request_seconds)
        body = b"" if self.command == "HEAD" else answer.body
        try:
            self.connection.sendall(answer.head(close=self.close_connection) + body)
        except (TimeoutError, ConnectionError) as error:
            log.debug("%s: %s did not take its answer: %s", self.server.name, self.client_address, error)
            self.close_connection, self._unread = True, False

    def finish(self) -> None:
        """Read away what was not wanted, so that the answer is not lost."""
        try:
            if self._unread:
                self._reader.allow(_LINGER_SECONDS, 2**40, end=True)
                self.connection.shutdown(socket.SHUT_WR)
                while self.rfile.read1(2**16):
                    pass
        except OSError as error:
            log.debug("%s: %s went on sending: %s", self.server.name, self.client_address, error)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Only for those who ask for details."""
        log.debug("%s: %r", self.server.name, format % args)
