"""An arm that is driven directly, over the `franky-control` package (extra `franky`)."""

from __future__ import annotations
