"""The one HTTP server layer: who may ask, how much, how long, and that everybody gets an answer.

`WebServer` is the base of the simulated robot and of the teleoperation page. A subclass has one method,
`respond(request)`, and sees requests that have passed these checks:

| check | refused with |
|---|---|
| `Host` names this server, so that a foreign name that was pointed here (DNS rebinding) leads nowhere | 403 |
| a browser shows this server's page (`Origin`, `Sec-Fetch-Site`); without `pages`, no browser at all | 403 |
| with `pages`, a POST carries the token that the server's own page was given | 403 |
| one `Content-Length`, at most `max_body_bytes`, and no chunks | 400, 411, 413 |
| a body is `application/json`: an object of finite numbers, not nested too deeply | 415, 400 |
| the request arrives within `request_seconds`, its head within `MAX_HEAD_BYTES` | 408, 431 |
| at most `max_connections`: the one that has been silent longest is closed for a new one | 503 |

Programs send neither `Origin` nor `Sec-Fetch-Site` and need no token without `pages`. Errors are JSON,
`{"error": "..."}`.
"""

from guerdon.web.connection import Answer, HttpError, Request
from guerdon.web.server import TOKEN_HEADER, WebServer, is_loopback

__all__ = ["TOKEN_HEADER", "Answer", "HttpError", "Request", "WebServer", "is_loopback"]
