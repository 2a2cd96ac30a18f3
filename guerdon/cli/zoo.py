"""`guerdon zoo` and `guerdon collect-demos`: train on a model of the zoo, record demonstrations for it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from guerdon.cli.verb import Result, aligned, next_command, setting
from guerdon.config import EnvConfig
from guerdon.config.load import load_serial
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.plugins import load_plugins
from guerdon.core.types import display_path
from guerdon.envs.make import make_vector_env
from guerdon.rewards import REWARD_MODELS, write_demonstrations
from guerdon.rewards.zoo.demonstrations import SUFFIX, returns_of
from guerdon.training.checkpoints import load_policy
from guerdon.training.experts import CHECKPOINT_SUFFIX, SCRIPTED, expert_policy
from guerdon.training.rollouts import noise_ranked
from guerdon.training.serial import serial_pipeline_reward_model

PLUGIN_KINDS = {
    "guerdon.reward_models": "reward model",
    "guerdon.agents": "agent",
    "guerdon.formats": "data format",
    "guerdon.envs": "env type",
}
"""Entry-point group -> what its plugins are."""


def zoo_verb(arguments: argparse.Namespace) -> Result:
    """Train as a config of the zoo says, or list the models."""
    if arguments.overrides == ["list"]:
        known = models()
        lines = [
            f"{item['name']:<15}{item['rewards']}{' (demonstrations)' * item['needs_demonstrations']}"
            for item in known
        ]
        listed = plugins()
        lines += [f"{item['name']:<15}{item['kind']} of the plugin {item['distribution']}" for item in listed]
        return Result({"models": known, "plugins": listed}, lines)
    if (arguments.config_name is None) == (arguments.di_engine is None):
        raise ConfigError("give --config-name or --di-engine, or `guerdon zoo list` to see the models")
    if arguments.di_engine is not None and arguments.di_engine.suffix != ".py":
        raise ConfigError(f"--di-engine takes a Python file with main_config, not {arguments.di_engine}")
    name = arguments.config_name or arguments.di_engine
    summary = run_zoo(name, arguments.overrides, arguments.config_path, trust=arguments.trust)
    folder = summary["folder"]
    steps = [] if folder is None else [next_command("evaluate", "--checkpoint", display_path(folder))]
    return Result(summary, _zoo_lines(summary), next_steps=steps)


def collect_demos_verb(arguments: argparse.Namespace) -> Result:
    """Record demonstrations."""
    names = ("policy", "episodes", "noise", "seed")
    settings = {name: getattr(arguments, name) for name in names}
    result = collect_demos(arguments.out, env_id=arguments.env, **settings)
    line = f"{result['episodes']} episodes, {result['transitions']} transitions, mean return "
    lines = [f"{line}{result['mean_return']:.2f} -> {display_path(arguments.out)}"]
    training = next_command(
        "zoo", "--config-name", "CONFIG", setting("reward_model.data_path", arguments.out)
    )
    return Result(result, lines, next_steps=[f"{training}  # a config of the same env; `guerdon zoo list`"])


def run_zoo(
    name: str | Path, overrides: Sequence[str], config_path: str | None = None, *, trust: bool = False
) -> dict[str, Any]:
    """Train as a config says; returns what `summary.json` holds."""
    cfg = load_serial(name, overrides, config_path, trust=trust)
    result = serial_pipeline_reward_model(cfg)
    return {
        "env": cfg.env.train.id,
        "algorithm": cfg.learner.algorithm,
        "reward_model_type": cfg.reward_model.get("type"),
        "stop_value": cfg.stop_value,
        "seed": cfg.seed,
        **result.summary(),
    }


def _zoo_lines(summary: dict[str, Any]) -> list[str]:
    def shown(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.2f}"

    aim = "" if summary["stop_value"] is None else f", {summary['stop_value']:g} wanted"
    rows = [
        ("reward model", f"{summary['reward_model_type']} with {summary['algorithm']} on {summary['env']}"),
        ("return", f"{shown(summary['last_return'])} at the end, {shown(summary['best_return'])} best{aim}"),
        ("steps", f"{summary['env_steps']} in {summary['seconds']:.1f} s"),
    ]
    if summary["folder"] is not None:
        rows.append(("folder", display_path(summary["folder"])))
    return aligned(rows, 14)


def models() -> list[dict[str, Any]]:
    """All reward models of the table: name, what it rewards, whether it learns from demonstrations."""
    return [
        {
            "name": name,
            "rewards": (cls.__doc__ or "").strip().partition("\n")[0],
            "needs_demonstrations": cls.needs_experts,
        }
        for name, cls in sorted(REWARD_MODELS.items())
    ]


def plugins() -> list[dict[str, str]]:
    """What installed plugins bring; imports none of them."""
    return [
        {"name": name, "kind": kind, "distribution": plugin.distributions}
        for group, kind in PLUGIN_KINDS.items()
        for name, plugin in load_plugins(group).items()
    ]


def collect_demos(
    out: Path,
    *,
    env_id: str | None = None,
    policy: str = SCRIPTED,
    episodes: int = 10,
    noise: float = 0.0,
    seed: int = 0,
    num_envs: int = 10,
) -> dict[str, Any]:
    """Play whole episodes of a policy and write them as demonstrations.

    Args:
        out: the file, `.safetensors`.
        env_id: Gymnasium id; None: the one of the saved policy.
        policy: `scripted`, a run's folder or checkpoint, or a checkpoint of DI-engine.
        episodes: how many.
        noise: share of actions that are random, 0 to 1.
        seed: of environments and noise.
        num_envs: environments in parallel.
    """
    if out.suffix != SUFFIX:
        raise ConfigError(f"demonstrations are written to a file that ends in {SUFFIX}, not {out.name}")
    if episodes < 1 or num_envs < 1 or not 0.0 <= noise <= 1.0:
        raise ConfigError("episodes and environments must be at least 1, and noise from 0 to 1")
    cfg, act, space = _policy(policy, env_id)
    cfg = replace(cfg, num_envs=min(num_envs, episodes))
    env = make_vector_env(cfg, autoreset_mode=AutoresetMode.SAME_STEP, keep_final_frame=False)
    try:
        if space is not None and space != env.single_action_space:
            raise DataError(f"the policy is for actions {space}, {cfg.id} takes {env.single_action_space}")
        played = noise_ranked(env, act, [noise], episodes, seed=seed)[float(noise)]
    finally:
        env.close()
    write_demonstrations(out, played)
    returns = returns_of(played)
    return {
        "path": str(out),
        "env": cfg.id,
        "policy": policy,
        "episodes": len(played),
        "transitions": sum(map(len, played)),
        "noise": noise,
        "mean_return": float(returns.mean()),
        "min_return": float(returns.min()),
        "max_return": float(returns.max()),
    }


def _policy(policy: str, env_id: str | None) -> tuple[EnvConfig, Callable[[Any], NDArray[Any]], Any]:
    """Environment, policy and the action space that it was made for, if that is known."""
    if policy == SCRIPTED or policy.endswith(CHECKPOINT_SUFFIX):
        if env_id is None:
            raise ConfigError(f"--policy {policy} needs --env, the environment to play in")
        return EnvConfig(id=env_id), expert_policy(policy, env_id), None
    saved = load_policy(Path(policy))
    cfg = saved.playable_env(env_id, f"name it: --env {saved.env.id}")
    return cfg, lambda obs: saved.learner.act(obs, deterministic=True), saved.action_space
