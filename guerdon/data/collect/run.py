"""Stage 1 as a program: run a policy in an environment until the targets are met."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode

from guerdon.config import CollectConfig, EnvConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy
from guerdon.core.progress import progress_bar
from guerdon.core.types import FloatArray, display_path
from guerdon.data.collect.archive import EpisodeArchive, open_archive
from guerdon.data.collect.policies import CheckpointPolicy, Policy, RandomPolicy
from guerdon.data.collect.wrapper import VectorDataCollectorWrapper
from guerdon.data.formats import get_format
from guerdon.envs import ScriptedExpert
from guerdon.envs.make import is_maniskill, make_vector_env
from guerdon.envs.maniskill import expert as maniskill_expert
from guerdon.envs.observations import native_of, state_from
from guerdon.envs.tabletop.env import ACTION_SIZE

if TYPE_CHECKING:  # with it comes torch, which other environments do without
    from guerdon.envs.maniskill.env import ManiSkillVectorEnv

log = logging.getLogger("guerdon")

PATIENCE = 50
"""Without `max_episodes`, collecting gives up after this many times as many episodes as were asked for."""


@dataclass(frozen=True, kw_only=True)
class CollectResult:
    """What a run of `collect` added and what is there now."""

    save_dir: str
    format: str
    num_success: int
    """Successes in `save_dir` that count towards the target."""
    num_failure: int
    target_success: int | None
    target_failure: int | None
    num_unfinished: int
    num_dropped: int
    env_steps: int
    seconds: float
    complete: bool
    """Whether both targets are met."""
    reason: str
    """Why collecting stopped."""

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return asdict(self)

    @property
    def counts(self) -> str:
        """Such as `success 12/50 fail 28/150`."""
        good, bad = (
            str(count) if target is None else f"{count}/{target}"
            for count, target in (
                (self.num_success, self.target_success),
                (self.num_failure, self.target_failure),
            )
        )
        return f"success {good} fail {bad}"

    def __str__(self) -> str:
        rate = self.env_steps / max(self.seconds, 1e-9)
        time_taken = f"in {self.seconds:.1f} s ({rate:,.0f} steps/s)"
        return f"{self.counts} {time_taken} -> {display_path(self.save_dir)} ({self.format})"


def make_policy(cfg: CollectConfig, env: Any, seed: int) -> Policy:
    """The policy that `collect.policy` names."""
    if cfg.policy == "random":
        return RandomPolicy(env.single_action_space, seed)
    if cfg.policy == "checkpoint":
        if cfg.policy_checkpoint is None:
            raise ConfigError("collect.policy=checkpoint needs collect.policy_checkpoint")
        return CheckpointPolicy(cfg.policy_checkpoint, noise=cfg.policy_noise, seed=seed)
    if is_maniskill(env.unwrapped):
        return _maniskill_policy(cfg, env.unwrapped, seed)
    if cfg.policy == "motion_planner":
        raise ConfigError("collect.policy=motion_planner needs a ManiSkill task (env_type: maniskill)")
    if env.single_action_space.shape != (ACTION_SIZE,) or native_of(env) is None:
        raise ConfigError(
            f"there is no scripted policy for {env.spec.id if env.spec else env}; use another policy, "
            "such as random"
        )
    return ScriptedExpert(noise=cfg.policy_noise, seed=seed)


def _maniskill_policy(cfg: CollectConfig, env: ManiSkillVectorEnv, seed: int) -> Policy:
    """The scripted or planning policy of a ManiSkill task."""
    if cfg.policy == "motion_planner":
        from guerdon.envs.maniskill.planner import MotionPlanner

        return MotionPlanner(env)
    if (env.config.id, env.facts.control_mode) != (maniskill_expert.TASK, maniskill_expert.CONTROL_MODE):
        raise ConfigError(
            f"there is a scripted policy for {maniskill_expert.TASK} with control_mode "
            f"{maniskill_expert.CONTROL_MODE}, not for {env.config.id} with {env.facts.control_mode}"
        )
    return maniskill_expert.PickCubeExpert(noise=cfg.policy_noise, seed=seed)


def collect(
    env_cfg: EnvConfig,
    cfg: CollectConfig,
    *,
    seed: int = 0,
    archive: EpisodeArchive | None = None,
    policy: Policy | None = None,
    env: Any = None,
) -> CollectResult:
    """Collect labelled episodes until the targets are met.

    What is in `cfg.save_dir` stays; with `cfg.resume` it counts towards the targets. Seeds follow from `seed`
    and from how much is there already, so that a second run adds new episodes and not the same ones again.

    Args:
        env_cfg: the environment.
        cfg: the `collect` section.
        seed: seed of environments and policy.
        archive: where the episodes go instead of `cfg.save_dir`.
        policy: who acts, instead of `cfg.policy`.
        env: vector environments that are there already, which are closed in the end; None makes those of
            `env_cfg`.
    """
    kind = get_format(cfg.format)
    if not kind.writable:
        raise ConfigError(f"collect.format={cfg.format} can be read but not written")
    counts = kind.count(Path(cfg.save_dir)) if archive is None else (archive.num_success, archive.num_failure)
    there = sum(counts)
    env_seed, policy_seed = (int(s) for s in np.random.SeedSequence([seed, there]).generate_state(2) >> 1)
    if env is None:
        env = make_vector_env(env_cfg, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = make_policy(cfg, env, policy_seed) if policy is None else policy
    if archive is None:
        archive = open_archive(cfg.save_dir, cfg.format, cfg.target_success, cfg.target_failure, cfg.resume)
    if there and not cfg.resume:
        log.info("%s holds %d episodes already; new ones are added", display_path(cfg.save_dir), there)
    wrapped = VectorDataCollectorWrapper(
        env,
        cfg.save_dir,
        reward_render_mode=env_cfg.reward_render_mode,
        cameras=cfg.cameras,
        keep_states=cfg.keep_states,
        only_at_rest=cfg.only_at_rest,
        archive=archive,
    )
    started = time.perf_counter()
    try:
        steps, reason = _loop(wrapped, policy, cfg, env_seed)
    finally:
        wrapped.close()
    return CollectResult(
        save_dir=cfg.save_dir,
        format=cfg.format,
        num_success=archive.num_success,
        num_failure=archive.num_failure,
        target_success=archive.max_success,
        target_failure=archive.max_failure,
        num_unfinished=archive.num_unfinished,
        num_dropped=archive.num_dropped,
        env_steps=steps,
        seconds=time.perf_counter() - started,
        complete=archive.is_full,
        reason=reason,
    )


def _loop(env: VectorDataCollectorWrapper, policy: Policy, cfg: CollectConfig, seed: int) -> tuple[int, str]:
    """Step until the archive is full or it is no use to go on; returns steps and why it stopped."""
    archive = env.archive
    wanted = (archive.max_success or 0) + (archive.max_failure or 0)
    limit = cfg.max_episodes or PATIENCE * max(wanted, env.num_envs)
    before = archive.num_success + archive.num_failure
    steps = episodes = 0
    with progress_bar("collecting", total=wanted or None, unit="episode") as bar:
        bar.update(before)
        obs, _ = env.reset(seed=seed)
        try:
            while not archive.is_full:
                if episodes >= limit:
                    return steps, f"gave up after {episodes} episodes"
                seen = obs if getattr(policy, "takes_observations", False) else _states(env, obs)
                actions = _checked_actions(policy.act(seen), env)
                env.intended = getattr(policy, "intended", None)
                obs, _, terminated, truncated, _ = env.step(actions)
                done = np.asarray(terminated) | np.asarray(truncated)
                steps += env.num_envs
                if done.any():
                    policy.reset(done)
                    episodes += int(done.sum())
                    bar.set_postfix_str(archive.progress(), refresh=False)
                    bar.update(archive.num_success + archive.num_failure - bar.n)
        except KeyboardInterrupt:
            return steps, "interrupted"
    return steps, "targets met"


def _checked_actions(actions: Any, env: VectorDataCollectorWrapper) -> Any:
    """What a policy gave for N environments, if it has the shape of their actions and is finite."""
    wanted = env.action_space.shape
    if wanted is None:  # a tuple or a dict of spaces
        return actions
    found = to_numpy(actions)
    numbers = found.dtype.kind in "fiub"
    if found.shape != wanted or not numbers or not np.isfinite(found).all():
        what = f"shape {list(found.shape)}" if found.shape != wanted else "values that are not finite numbers"
        raise DataError(f"policy: its actions have {what}; the environments take finite {list(wanted)}")
    return actions


def _states(env: VectorDataCollectorWrapper, obs: Any) -> FloatArray:
    """What the policy acts on: the environment's own state vectors, or those in its observation."""
    native = native_of(env)
    states = state_from(obs) if native is None else native.state()
    if states is None:
        raise ConfigError("the policy needs state vectors, and this environment offers none")
    return states
