"""DI-engine's names of settings, environments, policies and reward models, and ours."""

from __future__ import annotations

ENVS: dict[str, str | None] = {
    "cartpole": "CartPole-v1",
    "pendulum": "Pendulum-v1",
    "acrobot": "Acrobot-v1",
    "mountain_car": "MountainCar-v0",
    "lunarlander": "LunarLander-v3",
    "bitflip": "guerdon/BitFlip-v0",
    "minigrid": None,
    "mujoco": None,
    "gym": None,
}
"""`create_config.env.type` -> Gymnasium id; None: `env.env_id` has to name it."""

ALGORITHMS = {"dqn": "dqn", "ngu": "dqn", "ppo": "ppo", "ppo_offpolicy": "ppo", "onppo": "ppo", "sac": "sac"}
"""`create_config.policy.type` -> `learner.algorithm`."""

REWARD_MODELS = {"guided_cost": "gcl", "rnd-ngu": "ngu"}
"""`reward_model.type` where ours has another name."""

INTRINSIC = ("rnd", "icm", "ngu")
"""Types whose reward is added to the environment's unless `intrinsic_reward_type` says otherwise."""

SECTION = {
    "learning_rate": "lr",
    "expert_data_path": "data_path",
    "offline_data_path": "data_path",
    "expert_model_path": "expert",
    "obs_norm": "normalize_obs",
    "max_snippet_length": "snippet_length",
    "sample_size": "expert_steps",
    "eps_list": "noise_levels",
    "num_trajs_per_bin": "episodes_per_level",
    "bc_iterations": "clone_updates",
}
"""Keys of their `reward_model` -> ours."""

IMITATING = ("airl", "drex", "gail", "gcl", "pdeil", "pwil", "red", "trex")
"""Types that learn from demonstrations."""

RANKED = ("trex", "drex")
"""Types that learn from rankings alone: before the policy does, and not again."""

RENAMES: dict[str, str] = {
    "exp_name": "exp_name",
    "seed": "seed",
    "env.collector_env_num": "env.train.num_envs",
    "env.evaluator_env_num": "env.eval.num_envs",
    "env.n_evaluator_episode": "learner.eval_episodes",
    "env.stop_value": "stop_value",
    "policy.model.encoder_hidden_size_list": "learner.network.hidden",
    "policy.discount_factor": "learner.{algorithm}.gamma",
    "policy.random_collect_size": "learner.{algorithm}.learning_starts",
    "policy.learn.learning_rate": "learner.{algorithm}.lr",
    "policy.learn.batch_size": "learner.{algorithm}.{batch_size}",
    "policy.learn.epoch_per_collect": "learner.ppo.update_epochs",
    "policy.learn.clip_ratio": "learner.ppo.clip_range",
    "policy.learn.entropy_weight": "learner.ppo.entropy_coef",
    "policy.learn.value_weight": "learner.ppo.value_coef",
    "policy.learn.adv_norm": "learner.ppo.normalize_advantage",
    "policy.learn.grad_clip_value": "learner.ppo.max_grad_norm",
    "policy.learn.target_update_freq": "learner.dqn.target_interval",
    "policy.learn.learning_rate_q": "learner.sac.critic_lr",
    "policy.learn.learning_rate_policy": "learner.sac.actor_lr",
    "policy.learn.learning_rate_alpha": "learner.sac.alpha_lr",
    "policy.learn.target_theta": "learner.sac.tau",
    "policy.learn.discount_factor": "learner.{algorithm}.gamma",
    "policy.learn.alpha": "learner.sac.initial_alpha",
    "policy.learn.auto_alpha": "learner.sac.learn_alpha",
    "policy.learn.target_entropy": "learner.sac.target_entropy",
    "policy.collect.discount_factor": "learner.ppo.gamma",
    "policy.collect.gae_lambda": "learner.ppo.gae_lambda",
    "policy.collect.demonstration_info_path": "reward_model.data_path",
    "policy.collect.model_path": "reward_model.expert",
    "policy.eval.evaluator.stop_value": "stop_value",
    "policy.eval.evaluator.n_episode": "learner.eval_episodes",
    "policy.other.eps.start": "learner.dqn.epsilon_start",
    "policy.other.eps.end": "learner.dqn.epsilon_end",
    "policy.other.replay_buffer.replay_buffer_size": "learner.{algorithm}.buffer_size",
    "env.n_bits": "env.train.init_params.num_bits",
    "policy.other.her.her_strategy": "reward_model.strategy",
    "policy.other.her.her_replay_k": "reward_model.k",
    **{f"reward_model.{theirs}": f"reward_model.{ours}" for theirs, ours in SECTION.items()},
}
"""Their path -> ours."""

COUNTED = (
    "policy.learn.update_per_collect",
    "policy.collect.n_sample",
    "policy.eval.evaluator.eval_freq",
    "policy.other.eps.decay",
    "policy.cuda",
    "env.env_id",
    "env.id",
    "policy.type",
    "policy.nstep",
    "policy.learn_unroll_len",
    "policy.collect.n_episode",
    "reward_model.type",
    "reward_model.collect_count",
    "reward_model.num_trajs",
    "reward_model.num_snippets",
    "reward_model.checkpoint_min",
    "reward_model.checkpoint_max",
    "reward_model.checkpoint_step",
    "reward_model.hidden_size",
    "reward_model.hidden_size_list",
    "reward_model.intrinsic_reward_type",
    "reward_model.intrinsic_reward_weight",
    "reward_model.intrinsic_reward_rescale",
)
"""Paths that the rules below read."""

_WITHOUT_MEANING = {
    "env": """
        manager act_scale use_act_scale norm_obs norm_reward continuous replay_path
        collector_episode_num evaluator_episode_num obs_plus_prev_action_reward""",
    "policy": """
        load_path on_policy priority priority_IS_weight continuous action_space recompute_adv
        multi_gpu burnin_step""",
    "policy.model": """
        obs_shape action_shape action_space actor_head_hidden_size critic_head_hidden_size dueling
        actor_head_layer_num critic_head_layer_num twin_critic share_encoder continuous collector_env_num
        activation""",
    "policy.learn": """
        learner multi_gpu ignore_done value_norm grad_clip_type grad_norm reparameterization init_w
        actor_update_freq log_space noise target_update_theta resume_training""",
    "policy.collect": "unroll_len collector env_num noise_sigma collector_logit traj_len_inf",
    "policy.eval": "env_num",
    "policy.eval.evaluator": "cfg_type",
    "policy.other": "replay_buffer commander",
    "policy.other.eps": "type",
    "policy.other.her": "episode_size sample_per_episode",
    "reward_model": """
        exp_name expert_load_path load_path reward_model_path algo_for_model env_id log_every_n_train
        store_model_every_n_train obs_norm_clamp_min obs_norm_clamp_max extrinsic_reward_norm nstep
        extrinsic_reward_norm_max bc_path continuous input_size obs_shape action_shape action_size
        s_size a_size discrete_action min_snippet_length last_nonzero_reward_rescale
        last_nonzero_reward_weight only_use_last_five_frames_for_icm_rnd""",
}
WITHOUT_MEANING = tuple(
    f"{section}.{name}" for section, names in _WITHOUT_MEANING.items() for name in names.split()
)
"""Paths, with all below them, that are accepted: what they set is not there, or the environment says it."""


OUR_SHAPES = ("obs_shape", "action_size")
THEIR_SHAPES = ("action_shape", "input_size", "s_size", "a_size", "continuous")
PLAYED = ("collect_count", "checkpoint_min", "checkpoint_max", "checkpoint_step")
INTRINSIC_KEYS = ("intrinsic_reward_type", "intrinsic_reward_weight", "intrinsic_reward_rescale")
"""Keys of a section that a pipeline uses, not the model."""
