"""Imported by the fork server of `test_distributed.py`: the ranks that it forks know fits in float64."""

from tests.fit.float64 import use_float64

use_float64()
