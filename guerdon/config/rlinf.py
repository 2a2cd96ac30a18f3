"""RLinf's own training files as settings of ours: `guerdon train --rlinf FILE.yaml`.

`compat.py` knows the spellings of RLinf's reward guides. RLinf's configs of whole trainings have another
shape: sections for actor, rollout, critic and algorithm, lengths in iterations, and files of config groups.
What has no meaning for a reward workflow is named once; what is unknown is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from guerdon.config.nested import ABSENT, Tree, dotted, get, leaves, parts, put, rename, subtree, whole
from guerdon.core.errors import ConfigError

ALGORITHMS = {"gae": "ppo", "actor_critic": "ppo", "embodied_sac": "sac"}
"""`algorithm.adv_type` or `loss_type` -> `learner.algorithm`."""

LOSSES = {"ppo": ("actor_critic", "decoupled_actor_critic"), "sac": ("embodied_sac",)}
"""`learner.algorithm` -> values of `algorithm.loss_type` that it stands for."""

POLICIES = ("mlp_policy", "cnn_policy")
"""`actor.model.model_type` with a counterpart: the policy's network follows from the observations."""
TRACKERS = ("tensorboard", "wandb")
"""Names in `logger_backends` with a counterpart."""
RENAMES: dict[str, str] = {
    "runner.logger.experiment_name": "runner.experiment_name",
    "runner.logger.log_path": "runner.output_dir",
    "runner.resume_dir": "runner.resume_dir",
    "runner.num_data_episodes": "runner.num_data_episodes",
    "cluster.num_nodes": "cluster.num_nodes",
    "cluster.component_placement": "cluster.component_placement",
    "actor.seed": "seed",
    "algorithm.gamma": "learner.{algorithm}.gamma",
    "algorithm.gae_lambda": "learner.ppo.gae_lambda",
    "algorithm.normalize_advantages": "learner.ppo.normalize_advantage",
    "algorithm.clip_ratio_high": "learner.ppo.clip_range",
    "algorithm.entropy_bonus": "learner.ppo.entropy_coef",
    "algorithm.tau": "learner.sac.tau",
    "algorithm.backup_entropy": "learner.sac.entropy_in_backup",
    "algorithm.critic_subsample_size": "learner.sac.num_min_critics",
    "algorithm.critic_actor_ratio": "learner.sac.actor_every",
    "algorithm.entropy_tuning.initial_alpha": "learner.sac.initial_alpha",
    "algorithm.entropy_tuning.target_entropy": "learner.sac.target_entropy",
    "algorithm.entropy_tuning.optim.lr": "learner.sac.alpha_lr",
    "algorithm.demo_buffer.load_path": "learner.sac.prior_data",
    "actor.model.num_q_heads": "learner.sac.num_critics",
    "actor.critic_optim.lr": "learner.sac.critic_lr",
    "reward.use_reward_model": "reward.use_reward_model",
    "reward.reward_mode": "reward.reward_mode",
    "reward.reward_threshold": "reward.reward_threshold",
    "reward.standalone_realworld": "reward.standalone",
    **{
        f"{place}.{theirs}": f"reward.model.{ours}"
        for place in ("reward.model", "fit.model")
        for theirs, ours in {
            "model_path": "checkpoint_path",
            "arch": "arch",
            "hidden_dim": "hidden_dim",
            "dropout": "dropout",
            "image_size": "image_size",
            "normalize": "normalize",
            "precision": "precision",
        }.items()
    },
    # A fit of RLinf's `examples/reward`: `actor`, `data` and `runner` are moved below `fit` first.
    "fit.runner.max_epochs": "fit.epochs",
    "fit.runner.early_stop.min_delta": "fit.early_stop.min_delta",
    "fit.data.train_data_paths": "fit.data.path",
    "fit.data.num_workers": "fit.data.num_workers",
    "fit.micro_batch_size": "fit.micro_batch_size",
    "fit.global_batch_size": "fit.global_batch_size",
    "fit.seed": "seed",
    "fit.optim.lr": "fit.optim.lr",
    "fit.optim.weight_decay": "fit.optim.weight_decay",
    "fit.optim.clip_grad": "fit.optim.clip_grad",
    "fit.optim.lr_warmup_steps": "fit.lr_sched.warmup_steps",
}
"""Their path -> ours; a path stands for everything below it."""

ENV_RENAMES: dict[str, str] = {
    "total_num_envs": "num_envs",
    "max_episode_steps": "max_episode_steps",
    "override_cfg": "override_cfg",
    "init_params.id": "id",
    "init_params.sim_config": "init_params.sim_config",
    "init_params.sensor_configs.shader_pack": "init_params.shader_pack",
}
"""The same for `env.train` and `env.eval`."""

_NAMES = {
    "counted": """
        runner.task_type runner.max_epochs runner.max_steps runner.val_check_interval
        runner.save_interval runner.logger.logger_backends runner.logger.project_name algorithm.adv_type
        fit.runner.logger.logger_backends fit.runner.logger.project_name algorithm.loss_type
        algorithm.update_epoch algorithm.entropy_tuning.alpha_type
        algorithm.replay_buffer.sample_window_size algorithm.replay_buffer.cache_size
        algorithm.replay_buffer.min_buffer_size actor.global_batch_size actor.model.hidden_dim actor.optim.lr
        actor.optim.clip_grad reward.reward_weight reward.env_reward_weight reward.use_reward_prob
        reward.model.model_type reward.model.pretrained fit.model.model_type fit.model.pretrained
        fit.runner.val_check_interval fit.runner.save_interval fit.runner.early_stop.enabled
        fit.runner.early_stop.patience fit.runner.early_stop.monitor fit.data.val_data_paths""",
    "env_counted": """
        env_type init_params.obs_mode init_params.control_mode init_params.sim_backend
        init_params.sensor_configs.width init_params.sensor_configs.height rollout_epoch
        use_full_state max_steps_per_rollout_epoch ignore_terminations use_spacemouse reward_mode
        data_collection""",
    "without_meaning": """
        hydra rollout critic weight_syncer hybrid_engines data profile algorithm actor runner
        reward.group_name reward.model.add_value_head env.group_name env.channel env.enable_offload
        fit.group_name fit.training_backend fit.enable_offload fit.fsdp_config fit.model fit.optim
        fit.runner fit.cluster env.train env.eval cluster.node_groups""",
    "robot_without_meaning": """
        is_dummy use_dense_reward camera_serials clip_x_range clip_y_range clip_z_range_low
        clip_z_range_high clip_rz_range""",
}

COUNTED = _NAMES["counted"].split()
"""Paths that the rules below read."""

ENV_COUNTED = _NAMES["env_counted"].split()

WITHOUT_MEANING = _NAMES["without_meaning"].split()
"""Paths, with all below them, that a reward workflow has no use for, unless they are named above."""


def from_rlinf(given: Mapping[str, Any], name: str = "") -> tuple[Tree, list[str]]:
    """Settings of ours, and one line for each group of settings that have no meaning here.

    Args:
        given: a composed config of RLinf, with its references resolved.
        name: of the file; RLinf starts `*_async` by another script.

    Raises:
        ConfigError: the algorithm or the kind of environment has no counterpart, or a setting is unknown.
    """
    theirs: Tree = {key: value for key, value in given.items() if key != "hydra"}
    fits = get(theirs, "runner.task_type", "embodied") == "sft"
    if fits:
        theirs = {
            "fit": {**subtree(theirs, "actor"), **{key: subtree(theirs, key) for key in ("data", "runner")}}
        }
    for place in ("reward.model.model_type", "fit.model.model_type"):
        if (kind := get(theirs, place, "resnet")) not in ("resnet", "resnet_reward"):
            raise ConfigError(f"{place} {kind!r} has no counterpart; RLinf's image classifier 'resnet' has")
    ours: Tree = {}
    algorithm = "" if fits or "algorithm" not in theirs else _algorithm(theirs)
    if algorithm:
        put(ours, "learner.algorithm", algorithm)
    notices: list[str] = []
    if get(theirs, "algorithm.loss_type", None) == "decoupled_actor_critic":
        notices.append("algorithm.loss_type ('decoupled_actor_critic': PPO learns between its rollouts here)")
    for path, value in leaves(theirs):
        key = dotted(path)
        if value is None or key in COUNTED:
            continue
        if key == "cluster.node_groups":
            if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
                raise ConfigError(f"{key} must be a list of sections, not {repr(value)[:60]}")
            put(ours, key, [{part: each[part] for part in NODE_GROUP if part in each} for each in value])
            continue
        if path[0] == "env" and len(path) > 2 and path[1] in ("train", "eval"):
            _env_setting(ours, str(path[1]), dotted(path[2:]), value, notices)
            continue
        new_path, rule = rename(path, RENAMES)
        new = dotted(new_path)
        if rule is not None and _is_used(new, algorithm):
            if not _is_placeholder(value):
                put(ours, new.format(algorithm=algorithm), value)
            else:
                notices.append(f"{key} ({value!r})")
        elif any(key == known or key.startswith(f"{known}.") for known in WITHOUT_MEANING):
            notices.append(".".join(key.split(".")[:2]))
        else:
            raise ConfigError(f"unknown setting of RLinf, {key!r}")
    for place in ("train", "eval"):
        _environment(theirs, ours, place)
    _collect(theirs, ours)
    _reward(theirs, ours)
    _trackers(theirs, ours, notices)
    if fits:
        _fit(theirs, ours, notices)
    elif algorithm:
        _learner(theirs, ours, algorithm)
    if "async" in name and algorithm == "sac":
        put(ours, "asynchronous.enabled", True)
    unique = list(dict.fromkeys(notices))
    return ours, [f"without meaning here: {', '.join(unique)}"] if unique else []


def _is_used(new: str, algorithm: str) -> bool:
    path = new.split(".")
    others = {"ppo", "sac"} - {algorithm}
    return path[0] != "learner" or (bool(algorithm) and path[1] not in others)


def _is_placeholder(value: Any) -> bool:
    """Text that RLinf's files have where a user has to write something."""
    return isinstance(value, str) and (not value or value.startswith(("/path/to", "path/to")))


def _algorithm(theirs: Tree) -> str:
    """The learner of a training; one without a counterpart, or whose policy has none, is refused."""
    loss = get(theirs, "algorithm.loss_type", None)
    named = get(theirs, "algorithm.adv_type", loss)
    ours = ALGORITHMS.get(str(named))
    if ours is None or (loss is not None and str(loss) not in LOSSES[ours]):
        what = named if ours is None else loss
        known = ", ".join(ALGORITHMS)
        raise ConfigError(
            f"RLinf's algorithm {repr(what)[:60]} has no counterpart; those of {known} have one"
        )
    if (policy := get(theirs, "actor.model.model_type", POLICIES[0])) not in POLICIES:
        known = " and ".join(POLICIES)
        raise ConfigError(
            f"the policy actor.model.model_type {repr(policy)[:60]} has no counterpart; {known} have"
        )
    if get(theirs, "actor.model.q_head_type", None) == "crossq":
        raise ConfigError("actor.model.q_head_type 'crossq' has no counterpart: critics are those of SAC")
    return ours


def _env_setting(ours: Tree, place: str, key: str, value: Any, notices: list[str]) -> None:
    if key in ENV_COUNTED or key.startswith("data_collection."):
        return
    new_path, rule = rename(parts(key), ENV_RENAMES)
    if rule is None:
        notices.append(f"env.*.{key.split('.')[0]}")
    elif key.startswith("override_cfg.") and (
        _is_unset(value) or key.rsplit(".")[-1] in ROBOT_WITHOUT_MEANING
    ):
        notices.append(f"env.*.{key}")
    else:
        put(ours, ("env", place, *new_path), value)


NODE_GROUP = ("label", "node_ranks", "hardware")
"""What a group of machines has here; RLinf's also name interpreters."""

ROBOT_WITHOUT_MEANING = _NAMES["robot_without_meaning"].split()


def _is_unset(value: Any) -> bool:
    """`TARGET_EE_POSE`, `ROBOT_IP`: to be replaced by the user."""
    return isinstance(value, str) and value.isupper() and "_" in value


def _environment(theirs: Tree, ours: Tree, place: str) -> None:
    given = subtree(theirs, f"env.{place}")
    if not given:
        return
    kind = given.get("env_type", "maniskill")
    if kind == "realworld":
        put(ours, f"env.{place}.env_type", "robot")
        if given.get("use_spacemouse"):
            put(ours, f"env.{place}.operator", "spacemouse")
        for key in ("id", "max_episode_steps"):  # no task is registered; the limit is a setting of the arm
            value = get(ours, f"env.{place}.{key}", None)
            if value is not None:
                del ours["env"][place][key]
                if key == "max_episode_steps":
                    put(ours, f"env.{place}.override_cfg.{key}", value)
        return
    if kind != "maniskill":
        raise ConfigError(
            f"env.{place}.env_type {kind!r} has no counterpart; there are maniskill and realworld"
        )
    put(ours, f"env.{place}.env_type", "maniskill")
    params = f"env.{place}.init_params"
    full = bool(given.get("use_full_state"))
    mode = get(given, "init_params.obs_mode", "state")
    put(ours, f"{params}.obs_mode", "state" if full else mode)
    if full or mode == "state":
        put(ours, f"{params}.render_mode", "rgb_array")  # the reward model's frames
    control = get(given, "init_params.control_mode", None)
    if control not in (None, "None"):
        put(ours, f"{params}.control_mode", control)
    height = get(given, "init_params.sensor_configs.height", None)
    if height is not None:
        size = [height, get(given, "init_params.sensor_configs.width", height)]
        put(ours, f"{params}.image_size", size)
    if given.get("reward_mode") == "only_success":
        put(ours, f"{params}.reward_mode", "sparse")
    if not given.get("ignore_terminations", True):
        put(ours, f"{params}.terminate_on_success", True)


def _collect(theirs: Tree, ours: Tree) -> None:
    """`env.*.data_collection`; RLinf writes one pickle per episode, or a LeRobot data set."""
    for place in ("eval", "train"):
        given = subtree(theirs, f"env.{place}.data_collection")
        if not given.get("enabled"):
            continue
        put(ours, "collect.enabled", True)
        if given.get("save_dir"):
            put(ours, "collect.save_dir", given["save_dir"])
        kind = given.get("export_format", "pickle")
        if kind != "pickle":
            raise ConfigError(
                f"env.{place}.data_collection.export_format {kind!r} is not written; use 'pickle'"
            )
        put(ours, "collect.format", "pkl-episode")
        if given.get("only_success"):
            put(ours, "collect.target_failure", 0)


def _reward(theirs: Tree, ours: Tree) -> None:
    given = subtree(theirs, "reward")
    if {"reward_weight", "env_reward_weight"} & set(given):
        weights = {key: given[key] for key in ("reward_weight", "env_reward_weight") if key in given}
        ours.setdefault("reward", {}).update(combine_mode="weighted", **weights)
    if given.get("use_reward_prob"):
        put(ours, "reward.reward_type", "continuous")
    for place in ("reward.model", "fit.model"):
        model = get(theirs, place, None)
        if not isinstance(model, Mapping):
            continue
        put(ours, "reward.model.width", 64)  # full ResNets, on the camera that RLinf calls `main_images`
        if "pretrained" in model:
            put(ours, "reward.model.use_pretrain", bool(model["pretrained"]))


def _trackers(theirs: Tree, ours: Tree, notices: list[str]) -> None:
    """RLinf shows runs in TensorBoard, W&B or SwanLab; the name of a project is for the latter two."""
    for place in ("runner.logger", "fit.runner.logger"):
        if (given := get(theirs, f"{place}.logger_backends", None)) is None:
            continue
        names = given if isinstance(given, list) else [given]
        put(ours, "runner.logger.backends", [name for name in names if name in TRACKERS])
        others = [name for name in names if name not in TRACKERS]
        notices += [f"runner.logger.logger_backends ({repr(name)[:60]})" for name in others]
        if "wandb" in names and (project := get(theirs, f"{place}.project_name", None)) is not None:
            put(ours, "runner.logger.project_name", project)


def _learner(theirs: Tree, ours: Tree, algorithm: str) -> None:
    """Lengths: RLinf counts iterations, of so many steps in each environment; replay in trajectories."""
    train = subtree(theirs, "env.train")
    num_envs = whole(train, "total_num_envs", 1, low=1)
    length = whole(train, "max_steps_per_rollout_epoch", whole(train, "max_episode_steps", 50, low=1), low=1)
    num_steps = length * whole(train, "rollout_epoch", 1, low=1)
    iteration = num_steps * num_envs
    rounds = whole(theirs, "runner.max_epochs", 1, low=1)
    limit = whole(theirs, "runner.max_steps", -1)
    total = iteration * (min(rounds, limit) if limit > 0 else rounds)
    put(ours, "learner.total_steps", total)
    for theirs_key, our_key in (("val_check_interval", "eval_interval"), ("save_interval", "save_interval")):
        every = whole(theirs, f"runner.{theirs_key}", -1)  # -1: never, which is at the end here
        put(ours, f"learner.{our_key}", min(total, iteration * every) if every > 0 else total)
    batch = get(theirs, "actor.global_batch_size", None)
    rate = get(theirs, "actor.optim.lr", None)
    updates = whole(theirs, "algorithm.update_epoch", 1, low=1)
    width = whole(theirs, "actor.model.hidden_dim", 256, low=1)  # RLinf's policies have three layers of it
    put(ours, "learner.network.hidden", [width] * 3)
    if algorithm == "ppo":
        put(ours, "learner.ppo.num_steps", num_steps)
        put(ours, "learner.ppo.update_epochs", updates)
        if batch is not None:
            batch = whole(theirs, "actor.global_batch_size", 1, low=1)
            put(ours, "learner.ppo.minibatch_size", min(batch, iteration))
        if rate is not None:
            put(ours, "learner.ppo.lr", rate)
        if (clip := get(theirs, "actor.optim.clip_grad", None)) is not None:
            put(ours, "learner.ppo.max_grad_norm", clip)
        return
    put(ours, "learner.iteration_steps", iteration)
    put(ours, "learner.sac.updates_per_step", updates / iteration)
    if batch is not None:
        put(ours, "learner.sac.batch_size", batch)
    if rate is not None:
        put(ours, "learner.sac.actor_lr", rate)
    if get(theirs, "algorithm.entropy_tuning.alpha_type", None) == "fixed_alpha":
        put(ours, "learner.sac.learn_alpha", False)
    for name, key, low in (
        ("sample_window_size", "buffer_size", 1),
        ("min_buffer_size", "learning_starts", 0),
    ):
        place = f"algorithm.replay_buffer.{name}"
        if get(theirs, place, None) is not None:
            put(ours, f"learner.sac.{key}", whole(theirs, place, low, low=low) * length)


def _fit(theirs: Tree, ours: Tree, notices: list[str]) -> None:
    """RLinf fits full ResNets with Adam at a constant rate and without augmentation."""
    ours.setdefault("fit", {}).setdefault("optim", {}).setdefault("optimizer", "adam")
    put(ours, "fit.only", True)
    put(ours, "fit.lr_sched.name", "constant")
    put(ours, "fit.augment", {"shift_pixels": 0, "color": 0.0})
    for key in ("val_check_interval", "save_interval"):
        every = whole(theirs, f"fit.runner.{key}", -1)
        if every > 0:
            put(ours, f"fit.{key}", every)
    stop = subtree(theirs, "fit.runner.early_stop")
    if stop.get("enabled", True) and stop.get("patience") is not None:
        put(ours, "fit.early_stop.patience", stop["patience"])
        if stop.get("monitor") in ("val_loss", "val_accuracy"):
            put(ours, "fit.best_by", stop["monitor"])
    if get(theirs, "fit.data.val_data_paths") is not ABSENT:
        notices.append("data.val_data_paths (episodes are held out of the training data)")
