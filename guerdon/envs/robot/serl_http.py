"""The HTTP robot server that users of SERL and HIL-SERL run beside their arm.

Every route is a POST. Queries answer JSON; commands answer a word, whether or not the arm obeys: the server
only passes them on. That an arm stands still after an error shows in its state alone.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from guerdon.config.schema_robot import RobotEnvConfig
from guerdon.core.errors import ConfigError, RobotError, RobotUnreachableError
from guerdon.envs.robot.driver import RobotState
from guerdon.envs.robot.poses import Vector

log = logging.getLogger("guerdon")

RESET_TIMEOUT, STOP_TIMEOUT = 60.0, 5.0
"""Seconds for routes that answer only when the arm has moved or the controller has started or stopped."""
GRIPPER_STEPS = 255
"""What `/move_gripper` calls fully open."""


class HttpConnection:
    """One kept-alive connection; requests that get no answer are sent again, which all routes allow."""

    def __init__(self, url: str, timeout: float, retries: int) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"the robot's address must be like http://172.16.0.1:5000, not {url!r}")
        try:
            port = parts.port or 80
        except ValueError as error:
            raise ConfigError(f"the robot's address {url!r} has no proper port") from error
        self.url, self.timeout, self.retries = url.rstrip("/"), timeout, retries
        self.num_retries = 0
        """Requests that were sent again, since the beginning."""
        self._prefix = parts.path.rstrip("/")
        self._connection = http.client.HTTPConnection(parts.hostname, port, timeout=timeout)

    def request(
        self, method: str, route: str, content: Any | None = None, timeout: float | None = None
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """Status, body and headers of the answer; RobotUnreachableError if there is none after all tries."""
        body = None if content is None else json.dumps(content).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        if method == "POST" and body is None:
            headers["Content-Length"] = "0"
        error: Exception | None = None
        for attempt in range(self.retries + 1):
            if attempt:
                self.num_retries += 1
                time.sleep(min(0.01 * 2**attempt, 0.5) if attempt > 1 else 0.0)
            try:
                return self._send(method, route, body, headers, timeout)
            except (OSError, http.client.HTTPException) as problem:
                error = problem
                self._connection.close()
                log.debug("%s %s: %s", method, route, problem)
                if isinstance(problem, ConnectionRefusedError | socket.gaierror):
                    break  # nobody is there: asking again at once does not help
                if isinstance(problem, TimeoutError) and timeout is not None:
                    break  # it was asked to move, and may be at it
        tries = f" after {attempt + 1} tries" if attempt else ""
        reason = str(error) or type(error).__name__
        raise RobotUnreachableError(
            f"no answer from the robot at {self.url}{route}{tries}: {reason}"
        ) from error

    def _send(
        self, method: str, route: str, body: bytes | None, headers: dict[str, str], timeout: float | None
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        wait = self.timeout if timeout is None else timeout
        self._connection.timeout = wait
        if self._connection.sock is not None:
            self._connection.sock.settimeout(wait)
        self._connection.request(method, self._prefix + route, body, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read(), answer.headers

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class SerlHttpDriver:
    """An arm behind SERL's robot server."""

    def __init__(self, url: str, *, timeout: float = 1.0, retries: int = 4) -> None:
        self.connection = HttpConnection(url, timeout, retries)

    @classmethod
    def from_config(cls, config: RobotEnvConfig) -> SerlHttpDriver:
        """The server at `robot_ip` or `url`."""
        return cls(config.server_url, timeout=config.timeout, retries=config.retries)

    def state(self) -> RobotState:
        """`/getstate`."""
        return RobotState.from_answer(self._read("/getstate", self._post("/getstate")))

    def move(self, pose: Vector) -> None:
        """`/pose`."""
        self._post("/pose", {"arr": [float(value) for value in pose]})

    def open_gripper(self) -> None:
        """`/open_gripper`."""
        self._post("/open_gripper")

    def close_gripper(self) -> None:
        """`/close_gripper`."""
        self._post("/close_gripper")

    def move_gripper(self, position: float) -> None:
        """`/move_gripper`, which counts from 0 to 255."""
        steps = round(min(max(position, 0.0), 1.0) * GRIPPER_STEPS)
        self._post("/move_gripper", {"gripper_pos": steps})

    def reset(self) -> None:
        """`/jointreset`."""
        self._post("/jointreset", timeout=RESET_TIMEOUT)

    def clear_errors(self) -> None:
        """`/clearerr`."""
        self._post("/clearerr")

    def start(self) -> None:
        """`/startimp`."""
        self._post("/startimp", timeout=RESET_TIMEOUT)

    def stop(self) -> None:
        """`/stopimp`."""
        self._post("/stopimp", timeout=STOP_TIMEOUT)

    def update_param(self, parameters: Mapping[str, Any]) -> None:
        """`/update_param`."""
        self._post("/update_param", dict(parameters))

    def time_scale(self) -> float | None:
        """Of a simulated robot, which tells it under `/sim/info`; None at a real one."""
        status, body, _ = self.connection.request("GET", "/sim/info")
        return float(self._read("/sim/info", body)["time_scale"]) if status == 200 else None

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _post(self, route: str, content: Any | None = None, timeout: float | None = None) -> bytes:
        status, body, _ = self.connection.request("POST", route, content, timeout)
        if status == 404:
            raise RobotUnreachableError(f"{self.connection.url} has no {route}: is it a robot server?")
        if status != 200:
            text = body[:200].decode(errors="replace").strip()
            raise RobotError(f"the robot refused {route} with status {status}: {text}")
        return body

    def _read(self, route: str, body: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise RobotError(f"the robot's answer to {route} is no JSON: {body[:80]!r}") from error
        if not isinstance(answer, dict):
            raise RobotError(f"the robot's answer to {route} is no object: {body[:80]!r}")
        return answer
