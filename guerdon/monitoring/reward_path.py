"""Checks before the first update that the learned reward reaches the loss.

Typical faults raise nothing: advantages computed before relabelling, a return value dropped, a threshold read
from the wrong place. The policy then trains on something else. So the runner's own path from probabilities to
the objective is driven twice, with probabilities just below and just above the threshold, and must show the
difference. A control (`reward.control`) must show the opposite: no influence, or one in other places.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.config import RewardConfig
from guerdon.core.batches import ReplayBatch, TrainBatch
from guerdon.core.errors import GuerdonError
from guerdon.core.types import BoolArray, FloatArray
from guerdon.rewards.relabel import scored_frames

Relabel: TypeAlias = Callable[[FloatArray], NDArray[np.floating]]
Objective: TypeAlias = Callable[[], NDArray[np.floating]]
CONTROLS = ("off", "shuffled")
"""Of `reward.control`, those without information; `env` has another source of rewards and the same path."""
MARGIN = 0.01
"""How far from the threshold the two probabilities lie, as a share of the room on that side."""


class RewardPathError(GuerdonError):
    """The learned reward does not reach what the policy is trained on."""


def probe_probabilities(
    done: BoolArray, cfg: RewardConfig, threshold: float, seed: int = 0
) -> tuple[FloatArray, FloatArray, BoolArray]:
    """Two sets of probabilities that differ on some frames, by a hair around the threshold.

    Args:
        done: bool of any shape; whether the episode ended with the step.
        cfg: the `reward` section.
        threshold: the one that decides.
        seed: which frames differ.

    Returns:
        Probabilities below the threshold everywhere, the same but above it on about half of the scored
        frames, and which frames these are.
    """
    scored = scored_frames(done, cfg)
    raised = scored & (np.random.default_rng(seed).random(done.shape) < 0.5)
    if not raised.any():
        raised = scored.copy()
    below = np.full(done.shape, threshold - MARGIN * threshold, np.float32)
    above = np.where(raised, np.float32(threshold + MARGIN * (1.0 - threshold)), below).astype(np.float32)
    return below, above, raised


def check_reward_path(
    relabel: Relabel,
    objective: Objective,
    done: BoolArray,
    cfg: RewardConfig,
    threshold: float,
) -> None:
    """Drive the path twice; raises `RewardPathError` unless the reward and the objective follow.

    Args:
        relabel: takes probabilities of the shape of `done`, does what the runner does with scores, and
            returns the training rewards that the learner now holds.
        objective: what the loss is made of after relabelling: advantages (PPO), targets (SAC, DQN).
        done: bool; of the same rollout or batch.
        cfg: the `reward` section.
        threshold: the one that decides: the checkpoint's own, or the number in the config.
    """
    low, high, raised = probe_probabilities(done, cfg, threshold)
    if not raised.any():
        raise RewardPathError("the check needs a finished episode in its rollout; there is none")
    weight = _expected_change(cfg, float(low.flat[0]), float(high[raised][0]))
    if cfg.control in CONTROLS:
        _check_control(relabel, objective, low, high, cfg.control, int(scored_frames(done, cfg).sum()))
        return
    if weight == 0.0:
        raise RewardPathError(
            "with these settings the learned reward has no influence: success_reward equals fail_reward, or "
            "reward_weight is 0"
        )
    change, effect = _drive(relabel, objective, low, high)
    if not change[raised].any():
        raise RewardPathError(
            f"the training rewards stay the same when probabilities cross the threshold of {threshold:.4f}: "
            "the scores are dropped on the way, or another threshold is used"
        )
    if not np.allclose(change[raised], change[raised][0]) or change[raised][0] * weight <= 0:
        raise RewardPathError(
            f"frames that pass the threshold of {threshold:.4f} change the training reward by "
            f"{change[raised].min():g} to {change[raised].max():g}, where the settings say {weight:g}"
        )
    if change[~raised].any():
        raise RewardPathError("training rewards change on frames whose probability stayed the same")
    _check_objective(effect, weight)


def check_learned_rewards(
    relabel: Relabel,
    objective: Objective,
    shape: tuple[int, ...],
    weight: float,
    control: str = "none",
) -> None:
    """The same for learned rewards of any size: driven with zeros, and with ones on about half of the rows.

    Args:
        relabel: takes learned rewards of `shape`, does what the loop does with them, and returns the training
            rewards that the learner now holds.
        objective: what the loss is made of after relabelling: advantages (PPO), targets (SAC, DQN).
        shape: of the transitions at hand.
        weight: that the settings give to the learned reward.
        control: `reward.control`.
    """
    if not weight and control not in CONTROLS:
        raise RewardPathError("with these settings the learned reward has no influence: its weight is 0")
    raised = np.random.default_rng(0).random(shape) < 0.5
    raised.flat[0] = True
    zeros = np.zeros(shape, np.float32)
    if control in CONTROLS:
        _check_control(relabel, objective, zeros, raised.astype(np.float32), control, raised.size)
        return
    change, effect = _drive(relabel, objective, zeros, raised.astype(np.float32))
    if not change[raised].any():
        raise RewardPathError(
            "the training rewards stay the same when the learned ones change: they are dropped on the way"
        )
    if not (change[raised] * weight > 0).all() or change[~raised].any():
        raise RewardPathError(
            "the training rewards do not follow the learned ones: they change elsewhere, or the other way"
        )
    _check_objective(effect, weight)


def _check_control(
    relabel: Relabel, objective: Objective, low: FloatArray, high: FloatArray, control: str, num_judged: int
) -> None:
    """A control must not carry what the model says: `off` nothing at all, `shuffled` only how much it is."""
    change, effect = _drive(relabel, objective, low, high)
    if control == "off" and (change.any() or effect.any()):
        raise RewardPathError("reward.control is off, but the learned reward changes what is trained on")
    expected = np.count_nonzero(high != low) if num_judged > 1 else 0  # a single one has no other place
    if control == "shuffled" and np.count_nonzero(change) != expected:
        raise RewardPathError("reward.control is shuffled, but some rewards are lost or made on the way")


def _drive(
    relabel: Relabel, objective: Objective, low: FloatArray, high: FloatArray
) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """How much training rewards and objective change from `low` to `high`."""
    rewards_low, objective_low = np.array(relabel(low)), np.array(objective())
    rewards_high, objective_high = np.array(relabel(high)), np.array(objective())
    return rewards_high - rewards_low, objective_high - objective_low


def drive_targets(
    learner: Any,
    batch: ReplayBatch,
    relabel: Callable[[ReplayBatch, FloatArray], FloatArray],
    check: Callable[[Callable[[FloatArray], FloatArray], Callable[[], NDArray[np.floating]]], bool | None],
) -> bool:
    """Let `check` drive a sample to the targets of an off-policy agent, which is as before afterwards.

    Args:
        learner: has `targets`, `state_dict` and `load_state_dict`.
        batch: the sample.
        relabel: what the run does with the values of a sample; returns training rewards.
        check: takes `relabel` and `objective` as `check_reward_path` does; may say that it did not check.

    Returns:
        Whether the path was checked.
    """
    held: list[TrainBatch] = []
    state = copy.deepcopy(learner.state_dict())

    def relabelled(values: FloatArray) -> FloatArray:
        rewards = relabel(batch, values)
        held[:] = [batch.train_batch(torch.from_numpy(rewards))]
        return rewards

    def objective() -> NDArray[np.floating]:
        learner.load_state_dict(state)  # targets draw random numbers: the same ones each time
        targets: NDArray[np.floating] = learner.targets(held[0]).detach().cpu().numpy()
        return targets

    checked = check(relabelled, objective)
    learner.load_state_dict(state)
    return checked is not False


def _check_objective(effect: NDArray[np.floating], weight: float) -> None:
    if not np.abs(effect).max(initial=0.0) > 1e-6 * abs(weight):
        raise RewardPathError(
            "the training rewards change, but what the policy is trained on does not: it is computed before "
            "relabelling, or from another reward"
        )


def _expected_change(cfg: RewardConfig, low: float, high: float) -> float:
    """What crossing the threshold adds to the training reward, before scaling."""
    change = high - low if cfg.reward_type == "continuous" else cfg.success_reward - cfg.fail_reward
    return change * cfg.reward_weight if cfg.combine_mode == "weighted" else change
