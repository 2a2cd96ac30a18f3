"""RND, ICM, NGU and HER for `bench_zoo`: the settings that are shipped, and what they are to reach.

Here the environment's reward is not hidden from RND, ICM and NGU: theirs joins it, and the control is the
environment's reward alone, or with noise. HER computes rewards by the environment's own rule.

On CartPole (`cartpole_*`) the environment's reward is enough by itself, so that no control fails: what is
to be seen is that curiosity does not get in its way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

import guerdon

CONFIGS = Path(guerdon.__file__).parent / "conf" / "zoo"


def _settings(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return settings


def _case(name: str, target: float, measure: str = "env_return", hidden: bool = False) -> dict[str, Any]:
    return {
        "settings": _settings(name),
        "demonstrations": None,
        "target": target,
        "measure": measure,  # a field of `Evaluation`
        "hidden": hidden,  # whether the environment's reward is out of sight
        "pretrain": False,
    }


CASES: dict[str, dict[str, Any]] = {
    **{f"deep_sea_{kind}": _case(f"deep_sea_{kind}", 0.9) for kind in ("rnd", "icm", "ngu")},
    **{f"doorkey_{kind}": _case(f"doorkey_{kind}", 0.9) for kind in ("rnd", "icm", "ngu")},
    **{f"cartpole_{kind}": _case(f"cartpole_{kind}", 475.0) for kind in ("rnd", "icm", "ngu")},
    "bit_flip_her": _case("bit_flip_her", 0.9, "success_at_end", hidden=True),
    "point_goal_her": _case("point_goal_her", 0.9, "success_at_end", hidden=True),
}
