"""DI-engine's `(main_config, create_config)` in our spelling: one table of renames and the few other rules.

What has no meaning here is accepted and named in the notices; what is unknown is an error. Works on plain
nested dicts and changes none of its arguments.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from guerdon.config.build import to_plain
from guerdon.config.di_engine_names import (
    ALGORITHMS,
    COUNTED,
    ENVS,
    IMITATING,
    INTRINSIC,
    INTRINSIC_KEYS,
    OUR_SHAPES,
    PLAYED,
    RANKED,
    RENAMES,
    REWARD_MODELS,
    SECTION,
    THEIR_SHAPES,
    WITHOUT_MEANING,
)
from guerdon.config.nested import (
    ABSENT,
    Tree,
    dotted,
    get,
    leaves,
    merged,
    number,
    parts,
    put,
    subtree,
    whole,
)
from guerdon.config.schema_zoo import SerialConfig
from guerdon.core.errors import ConfigError

MAX_CHECKPOINTS = 1000
"""Of the experts whose episodes are ranked."""

NGU = ("episodic_reward_model", "rnd_reward_model")
"""Sections of two reward models that are one here; the later wins."""


def from_di_engine(
    main: Mapping[str, Any], create: Mapping[str, Any], total_steps: int | None = None
) -> tuple[Tree, list[str]]:
    """Their pair of configs as one tree of ours, and notices of what has no meaning here.

    Args:
        main: `main_config`.
        create: `create_config`; its types join those of `main`.
        total_steps: the run's length in environment steps; None: that of our defaults.

    Raises:
        ConfigError: a setting, a type of environment or a type of policy is unknown.
    """
    theirs = _joined(to_plain(main), to_plain(create))
    algorithm = _algorithm(get(theirs, "policy.type", None))
    ours: Tree = {"learner": {"algorithm": algorithm}}
    if total_steps is not None:
        put(ours, "learner.total_steps", total_steps)
    for place in ("train", "eval"):
        put(ours, ("env", place, "id"), _env_id(theirs))
    blank = {"algorithm": algorithm, "batch_size": "minibatch_size" if algorithm == "ppo" else "batch_size"}
    notices = [f"create_config.{dotted(path)}" for path, _ in leaves(to_plain(create)) if path[-1] != "type"]
    remarks: list[str] = []
    for path, value in leaves(theirs):
        key = dotted(path)
        if value is None or key in COUNTED or path[0] == "create":
            continue
        if _is_placeholder(value):
            notices.append(f"{key} ({value!r})")
            continue
        if key in RENAMES:
            new = RENAMES[key].format(**blank)
            if _is_used(new, algorithm):
                put(ours, new, value)
            else:
                notices.append(key)
        elif any(key == known or key.startswith(f"{known}.") for known in WITHOUT_MEANING):
            notices.append(key)
        elif path[0] == "reward_model":  # the model knows its own settings, or says what it knows
            put(ours, path, value)
        else:
            raise ConfigError(f"unknown setting of DI-engine, {key!r}{_nearest(key)}")
    _count_steps(theirs, ours, algorithm)
    if get(theirs, "policy.nstep", 1) != 1:
        remarks.append("policy.nstep counts as 1: a reward model scores single steps")
    if (params := get(ours, "env.train.init_params", None)) is not None:  # the same task is evaluated
        put(ours, "env.eval.init_params", dict(params))
        if ours.pop("stop_value", None) is not None:  # BitFlip: -1 a step here, 1 at the goal there
            remarks.append(
                "env.stop_value is left out: the reward is -1 a step here, and 1 at the goal there"
            )
    if algorithm == "dqn":
        _explore(theirs, ours)
    _reward_model(theirs, ours)
    if _needs_expert(ours):
        put(ours, "reward_model.expert", "scripted")
        remarks.append("no demonstrations are named: the environment's scripted policy plays them")
    if (cuda := get(theirs, "policy.cuda")) is not None:  # a GPU where there is one, as in DI-engine
        put(ours, "learner.device", "auto" if cuda else "cpu")
    if notices:
        remarks.insert(0, f"without meaning here: {', '.join(notices)}")
    return ours, remarks


def _joined(main: Tree, create: Tree) -> Tree:
    """One tree: the types of `create` in their sections, NGU's two reward models as one."""
    types: Tree = {"create": {}}
    for section in ("env", "policy", "reward_model"):
        kind = get(create, (section, "type"))
        if kind is not ABSENT:
            types[section] = {} if section == "env" else {"type": kind}
            types["create"][section] = kind
    pair = [subtree(main, name) for name in NGU]
    named = [main.pop(name, None) for name in NGU]
    joined: Tree = merged(types, main)
    for name in ("env", "policy", "reward_model"):
        subtree(joined, name)
    if get(joined, "policy.other.her") is not ABSENT:
        joined["reward_model"] = {"type": "her", **subtree(joined, "reward_model")}
    if any(each is not None for each in named):
        joined["reward_model"] = {**pair[0], **pair[1], "type": "ngu"}
    return joined


def _algorithm(kind: Any) -> str:
    if kind is None:
        raise ConfigError("create_config.policy.type is missing: it names the learner (dqn, ppo, sac)")
    name = str(kind).removesuffix("_command")
    if name not in ALGORITHMS:
        guess = _near(name, ALGORITHMS) or f"; known are {', '.join(ALGORITHMS)}"
        raise ConfigError(f"there is no learner for DI-engine's policy.type {kind!r}{guess}")
    return ALGORITHMS[name]


def _env_id(theirs: Tree) -> str:
    for key in ("env.env_id", "env.id"):
        if (named := get(theirs, key)) is not ABSENT:
            return str(named)
    kind = get(theirs, "create.env", None)
    if kind is None:
        raise ConfigError("create_config.env.type is missing: it names the environment")
    if str(kind) not in ENVS:
        guess = _near(str(kind), ENVS) or f"; known are {', '.join(ENVS)}"
        raise ConfigError(f"there is no environment for DI-engine's env.type {kind!r}{guess}")
    found = ENVS[str(kind)]
    if found is None:
        raise ConfigError(f"env.env_id is missing: env.type {kind!r} stands for many environments")
    return found


def _is_used(key: str, algorithm: str) -> bool:
    """Whether the learner of that name has a setting of ours; those of others have no effect."""
    path = parts(key)
    if path[0] != "learner":
        return True
    others = {"ppo", "dqn", "sac"} - {algorithm}
    return path[1] not in others and get(to_plain(SerialConfig()), path) is not ABSENT


def _count_steps(theirs: Tree, ours: Tree, algorithm: str) -> None:
    """Samples and updates of a round, and evaluations that are counted in updates."""
    num_envs = whole(ours, "env.train.num_envs", 1, low=1)
    samples = _given(theirs, "policy.collect.n_sample")
    episodes, bits = _given(theirs, "policy.collect.n_episode"), _given(theirs, "env.n_bits")
    if samples is None and episodes is not None and bits is not None:
        samples = episodes * bits  # an episode has as many steps as bits
    length = whole(theirs, "policy.learn_unroll_len", 1, low=1)  # samples of recurrent policies are sequences
    if samples is not None and length > 1:
        samples *= length
        batch = whole(theirs, "policy.learn.batch_size", 64, low=1)
        put(ours, ("learner", algorithm, "batch_size"), batch * length)
    updates = _given(theirs, "policy.learn.update_per_collect")
    if algorithm == "ppo":
        steps = -(-(samples or 64 * num_envs) // num_envs)
        put(ours, "learner.ppo.num_steps", steps)
        batches = math.ceil(steps * num_envs / whole(ours, "learner.ppo.minibatch_size", 256, low=1))
        if updates is not None:
            put(ours, "learner.ppo.update_epochs", max(1, round(updates / batches)))
        epochs = whole(ours, "learner.ppo.update_epochs", 4, low=1)
        updates_per_step = epochs * batches / (steps * num_envs)
    else:
        updates_per_step = {"dqn": 0.25, "sac": 1.0}[algorithm]
        if samples is not None:
            put(ours, "steps_per_collect", samples)
        if updates is not None:
            updates_per_step = updates / (samples or 1)
            put(ours, ("learner", algorithm, "updates_per_step"), updates_per_step)
    frequency = _given(theirs, "policy.eval.evaluator.eval_freq")
    if frequency is not None:
        put(ours, "learner.eval_interval", max(1, round(frequency / updates_per_step)))


def _given(theirs: Tree, path: str) -> int | None:
    """A count of at least 1, or None."""
    return None if get(theirs, path, None) is None else whole(theirs, path, 1, low=1)


def _explore(theirs: Tree, ours: Tree) -> None:
    """Random actions: a straight line with as many of them as their exponential decay has."""
    if get(theirs, "policy.other.eps.decay", None) is not None:
        decay = number(theirs, "policy.other.eps.decay", 0.0, low=0.0)
        steps = decay * (2.0 if get(theirs, "policy.other.eps.type") == "exp" else 1.0)
        total = whole(ours, "learner.total_steps", SerialConfig().learner.total_steps, low=1)
        put(ours, "learner.dqn.epsilon_fraction", min(1.0, steps / total))


def _reward_model(theirs: Tree, ours: Tree) -> None:
    """Its type under our name, the widths of its layers, and how its reward meets the environment's."""
    given = subtree(theirs, "reward_model")
    if "type" not in given:
        raise ConfigError("reward_model.type is missing: it names the reward model")
    kind = REWARD_MODELS.get(str(given["type"]), str(given["type"]))
    put(ours, "reward_model.type", kind)
    if (widths := _widths(given)) is not None:
        put(ours, "reward_model.hidden", widths)
    if "collect_count" in given and "data_path" not in ours["reward_model"]:
        put(ours, "reward_model.expert_steps", given["collect_count"])
    if kind in RANKED:
        _ranked(theirs, ours)
    how = given.get("intrinsic_reward_type", "add" if kind in INTRINSIC else "assign")
    if how == "add":
        weight = get(given, "intrinsic_reward_weight", given.get("intrinsic_reward_rescale", 1.0))
        put(ours, "mix", {"combine_mode": "weighted", "env_reward_weight": 1.0, "reward_weight": weight})
    elif how != "assign":
        raise ConfigError(f"reward_model.intrinsic_reward_type must be 'add' or 'assign', not {how!r}")


def section_from_di_engine(theirs: Mapping[str, Any]) -> tuple[Tree, list[str]]:
    """DI-engine's `cfg.reward_model` as a section of ours, and keys without meaning; ours is unchanged.

    Without environments their keys have to tell the shapes: `obs_shape` and `action_shape`, `s_size` and
    `a_size`, or `input_size`, of which an action, as a single number, is the last.
    """
    given: Tree = to_plain(theirs)
    used = {*OUR_SHAPES, *THEIR_SHAPES}
    dropped = [key for key in given if f"reward_model.{key}" in WITHOUT_MEANING and key not in used]
    unset = [key for key, value in given.items() if key not in dropped and _is_placeholder(value)]
    ours = {SECTION.get(key, key): value for key, value in given.items() if key not in (*dropped, *unset)}
    ours["type"] = REWARD_MODELS.get(str(given.get("type")), given.get("type"))
    dropped += [f"{key} ({given[key]!r})" for key in unset]
    dropped += [key for key in PLAYED if key in given]
    if ours.pop("expert", None) is not None:
        dropped.append("expert_model_path (the pipelines play an expert; a model alone has load_expert_data)")
    if "intrinsic_reward_type" in given:
        dropped.append("intrinsic_reward_type (estimate gives the model's reward alone, which pipelines mix)")
    if ours["type"] in RANKED:
        ours |= _pairs(given)
    for key in (
        *PLAYED,
        "num_trajs",
        "num_snippets",
        *THEIR_SHAPES,
        "hidden_size",
        "hidden_size_list",
        *INTRINSIC_KEYS,
    ):
        ours.pop(key, None)
    if (widths := _widths(given)) is not None:
        ours["hidden"] = widths
    actions = given.get("action_shape", given.get("a_size"))
    if "input_size" in given and "obs_shape" not in given:
        ours |= {
            "obs_shape": whole(given, "input_size", 0, low=2) - 1,
            "action_size": 1,
            "discrete_actions": False,
        }
    elif "s_size" in given:
        ours["obs_shape"] = given["s_size"]
    if actions is not None:
        ours |= {"action_size": actions, "discrete_actions": not given.get("continuous", False)}
    return ours, dropped


def _widths(given: Mapping[str, Any]) -> list[Any] | None:
    """Widths of the hidden layers, without that of the output."""
    if "hidden_size_list" in given:
        if not isinstance(given["hidden_size_list"], list):
            raise ConfigError(
                f"reward_model.hidden_size_list must be a list, not {repr(given['hidden_size_list'])[:60]}"
            )
        return [width for width in given["hidden_size_list"] if width != 1]
    return [given["hidden_size"]] if "hidden_size" in given else None


def _ranked(theirs: Tree, ours: Tree) -> None:
    """One gradient step for each compared pair, before the policy learns; experts are saved policies.

    T-REX's data lie in the experiment's folder.
    """
    ours |= {"pretrain_reward": True, "cooptrain_reward": False}
    for key, value in _pairs(subtree(theirs, "reward_model")).items():
        put(ours, f"reward_model.{key}", value)
    first, last, step = (
        whole(theirs, f"reward_model.checkpoint_{name}", 0, low=0) for name in ("min", "max", "step")
    )
    folder = get(theirs, "reward_model.expert_model_path", None)
    is_trex = get(theirs, "reward_model.type") == "trex"
    experiment = str(ours.get("exp_name", ""))
    if is_trex and os.path.isfile(Path(experiment, "episodes_data.pkl")):  # noqa: PTH113
        put(ours, "reward_model.data_path", experiment)
    elif folder is not None and not _is_placeholder(folder) and step and is_trex:
        numbers = range(first, last + 1, step)
        if not 0 < len(numbers) <= MAX_CHECKPOINTS:
            raise ConfigError(
                f"reward_model.checkpoint_min, _max and _step name {len(numbers)} checkpoints of experts; "
                f"there must be 1 to {MAX_CHECKPOINTS}"
            )
        put(ours, "reward_model.expert", [f"{folder}/ckpt/iteration_{number}.pth.tar" for number in numbers])


def _pairs(section: Mapping[str, Any]) -> Tree:
    """Updates of T-REX and D-REX, each with a pair of trajectories."""
    theirs = {"reward_model": dict(section)}
    snippets, trajectories, rounds = (
        whole(theirs, f"reward_model.{name}", default, low=0)
        for name, default in (("num_snippets", 0), ("num_trajs", 0), ("update_per_collect", 1))
    )
    pairs = snippets + trajectories
    return {"pretrain_updates": pairs * rounds, "batch_size": 2} if pairs else {}


def _is_placeholder(value: Any) -> bool:
    """Text that DI-engine's files have where a user has to write a path."""
    return isinstance(value, str) and ("placeholder" in value or value.startswith("abs "))


def _needs_expert(ours: Tree) -> bool:
    """Whether the reward model learns from demonstrations and none are named."""
    given = ours["reward_model"]
    return given["type"] in IMITATING and not {"data_path", "expert"} & set(given)


def _near(name: str, known: Iterable[str]) -> str:
    return "".join(f": did you mean {match!r}?" for match in get_close_matches(name, known, n=1))


def _nearest(key: str) -> str:
    known = [*RENAMES, *COUNTED, *WITHOUT_MEANING]
    place = key.rpartition(".")[0]
    here = [each for each in known if each.rpartition(".")[0] == place]
    return _near(key, known) or (f"; known here: {', '.join(here)}" if here else "")
