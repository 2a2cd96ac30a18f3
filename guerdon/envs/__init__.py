"""Environments. Importing this package registers `guerdon/Tabletop-v0` with Gymnasium."""

from __future__ import annotations

import gymnasium

from guerdon.envs.tabletop.env import TabletopEnv, TabletopVectorEnv
from guerdon.envs.tabletop.expert import ScriptedExpert

__all__ = ["TABLETOP_ID", "ScriptedExpert", "TabletopEnv", "TabletopVectorEnv"]

TABLETOP_ID = "guerdon/Tabletop-v0"

# No `max_episode_steps` here: the environment truncates by itself, and Gymnasium would do it again.
if TABLETOP_ID not in gymnasium.registry:
    gymnasium.register(
        id=TABLETOP_ID,
        entry_point="guerdon.envs.tabletop.env:TabletopEnv",
        vector_entry_point="guerdon.envs.tabletop.env:TabletopVectorEnv",
    )

for _name in ("FixedCartPole", "PointReach", "DeepSea", "BitFlip", "PointGoal"):
    if f"guerdon/{_name}-v0" not in gymnasium.registry:
        gymnasium.register(
            id=f"guerdon/{_name}-v0",
            entry_point=None,
            vector_entry_point=f"guerdon.envs.classic:{_name}",
        )
