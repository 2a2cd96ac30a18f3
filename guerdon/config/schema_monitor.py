"""The `monitor` section: what the monitor checks while a policy trains on a learned reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from guerdon.config.build import Checked
from guerdon.config.limits import Fraction, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class MonitorConfig(Checked):
    """`monitor`: signs that the policy exploits the reward model instead of solving the task."""

    action: Literal["warn", "stop", "off"] = "warn"
    """What an alarm does: a line in the log, the end of the run, or (`off`) no monitor at all."""
    max_success_gap: Fraction = 0.3
    """Share of episodes that the model calls a success and the environment does not."""
    max_fire_ratio: PositiveFloat = 5.0
    """Rate of wrong fires over the upper end of the interval that calibration promised; it is of the failure
    frames or of the frames that fire, whichever are more."""
    max_early_fires: Fraction = 0.3
    """Share of episodes that fire earlier than any success frame in calibration."""
    max_drift: PositiveFloat = 2.5
    """Distance of the encoder's features from those of the calibration frames, in their deviations."""
    max_disagreement: Fraction = 0.3
    """Mean deviation between the members of an ensemble on frames that fire."""
    max_success_drop: Fraction = 0.3
    """Models of the zoo: fall of the success rate from its best, while the learned return has risen."""
    max_reward_collapse: Fraction = 0.99
    """Models of the zoo: loss of the rewards' deviation, as a share of the largest one so far."""
    max_nonfinite_rewards: Fraction = 0.0
    """Models of the zoo: share of rewards that are NaN or infinite."""
    patience: PositiveInt = 3
    """Checks in a row above a limit that raise an alarm; as many below 0.8 of it clear the alarm."""
    min_episodes: PositiveInt = 20
    """Episodes that a rate is computed from, at least."""
    num_frames: PositiveInt = 8
    """Offending frames that an alarm saves."""
