"""Every module in here has `TARGETS`, name -> target; `load` joins them."""

from __future__ import annotations

import importlib
import pkgutil

from fuzz.worker import Target


def load() -> dict[str, Target]:
    """All targets by name."""
    joined: dict[str, Target] = {}
    for module in pkgutil.iter_modules(__path__):
        targets: dict[str, Target] = importlib.import_module(f"{__name__}.{module.name}").TARGETS
        twice = joined.keys() & targets.keys()
        if twice:
            raise ValueError(f"two targets are called {sorted(twice)[0]!r}")
        joined |= targets
    return joined
