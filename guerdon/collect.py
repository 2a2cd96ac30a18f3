"""Record labelled episodes: `guerdon.collect(env, ...)`, and the classes that it is made of.

The function is documented at `guerdon.api.data.collect`, the classes in `guerdon.data.collect`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from guerdon.data.collect import DataCollectorWrapper, RewardDataCollector, VectorDataCollectorWrapper

__all__ = ["DataCollectorWrapper", "RewardDataCollector", "VectorDataCollectorWrapper"]


class _CallableModule(ModuleType):
    """`import guerdon.collect` puts the module where `guerdon.collect(...)` is called: it is both."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function, for `inspect.signature` and the API reference."""
        from guerdon.api.data import collect

        return collect

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `guerdon.api.data.collect`."""
        return self.__wrapped__(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
