"""Who can reach a Ray cluster: our own listens on loopback and has a token, others are joined with theirs.

Ray listens on all interfaces of a machine unless it takes the loopback address for the machine's own, and it
runs whatever code it is sent. Its token authentication exists since 2.52, the lowest version that we accept.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
from collections.abc import Iterator, Mapping

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from guerdon.core.errors import ClusterError

log = logging.getLogger("guerdon")

MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""Environment variables of Ray: `token` or `disabled`, and the token."""


@contextlib.contextmanager
def own_cluster() -> Iterator[None]:
    """A cluster that is started meanwhile listens on loopback alone and answers who has its token.

    The token is a new one and goes to the cluster's processes by their environment, which only this user can
    read; the file that Ray would write to the home directory may be readable for all.
    """
    # Ray has no setting for it: it replaces `_node_ip_address="127.0.0.1"` by the address of an interface.
    # Where it has no clusters (macOS, Windows) it takes loopback, and this is how it knows.
    settings = {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0", MODE: "token", TOKEN: secrets.token_hex(32)}
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment(settings):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def joined_cluster(address: str) -> Iterator[None]:
    """A cluster that is joined meanwhile is shown the user's token; ClusterError if there is none."""
    mode = os.environ.get(MODE, "token")
    with _environment({MODE: mode}):
        if mode.lower() != "token":
            log.warning(
                "the Ray cluster at %s is joined without token authentication (%s=%s): whoever reaches its "
                "ports can run code on its machines", address, MODE, mode,
            )  # fmt: skip
        elif not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
            raise ClusterError(
                f"the Ray cluster at {address!r} cannot be joined without a token: make one with `ray "
                f"get-auth-token --generate`, copy it to ~/.ray/auth_token on all machines and start the "
                f"cluster with {MODE}=token; or set {MODE}=disabled for a cluster that asks for none"
            )
        yield


def check_loopback() -> None:
    """ClusterError if the cluster that we are connected to can be reached from elsewhere."""
    addresses = [item["NodeManagerAddress"] for item in ray.nodes()]  # type: ignore[no-untyped-call]
    open_ones = [item for item in addresses if not ipaddress.ip_address(item).is_loopback]
    if open_ones:
        raise ClusterError(
            f"Ray {ray.__version__} listens on {', '.join(open_ones)} instead of loopback: use another one"
        )


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for what starts meanwhile; Ray reads them again."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    _read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _read_again() -> None:
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
