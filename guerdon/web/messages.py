"""Requests and answers: strict JSON in and out, and headers that keep other pages away."""

from __future__ import annotations

import http
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from guerdon.core.errors import GuerdonError

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
            text.decode("utf-8"), parse_constant=_no_number, parse_float=_finite, parse_int=_whole
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


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _whole(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"{text[:20]}... is too large a number")
    return int(text)
