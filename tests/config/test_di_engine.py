"""Settings of the serial pipelines in every form, DI-engine's pair of configs among them."""

import logging

import pytest

from guerdon.config.di_engine import from_di_engine
from guerdon.config.load import ZOO_CONF, load_serial
from guerdon.config.schema_zoo import SerialConfig
from guerdon.core.errors import ConfigError


class EasyDict(dict):
    """As the pair comes: dicts whose keys are attributes too."""

    __getattr__ = dict.__getitem__


def easy(tree):
    return EasyDict({key: easy(value) if isinstance(value, dict) else value for key, value in tree.items()})


def dqn_pair():
    """With the keys of a DI-engine config for GAIL and DQN."""
    main = {
        "exp_name": "cartpole_dqn_gail",
        "env": {
            "collector_env_num": 8,
            "evaluator_env_num": 5,
            "n_evaluator_episode": 5,
            "stop_value": 195,
            "manager": {"shared_memory": True},
        },
        "reward_model": {
            "type": "gail",
            "input_size": 5,
            "hidden_size": 64,
            "batch_size": 64,
            "learning_rate": 2e-3,
            "update_per_collect": 100,
            "expert_data_path": "expert_data.pkl",
            "expert_load_path": "ckpt_best.pth.tar",
            "collect_count": 1000,
        },
        "policy": {
            "cuda": False,
            "load_path": "ckpt_best.pth.tar",
            "model": {
                "obs_shape": 4,
                "action_shape": 2,
                "encoder_hidden_size_list": [128, 128, 64],
                "dueling": True,
            },
            "nstep": 1,
            "discount_factor": 0.97,
            "learn": {"batch_size": 64, "learning_rate": 0.001, "update_per_collect": 3},
            "collect": {"n_sample": 64},
            "eval": {"evaluator": {"eval_freq": 30}},
            "other": {
                "eps": {"type": "exp", "start": 0.95, "end": 0.1, "decay": 10000},
                "replay_buffer": {"replay_buffer_size": 20000, "monitor": {"period": 60}},
            },
        },
    }
    create = {
        "env": {"type": "cartpole", "import_names": ["dizoo.classic_control.cartpole.envs.cartpole_env"]},
        "env_manager": {"type": "base"},
        "policy": {"type": "dqn"},
    }
    return easy(main), easy(create)


def ppo_pair():
    """With the keys of a DI-engine config for RND and PPO."""
    main = {
        "exp_name": "cartpole_ppo_rnd",
        "env": {"collector_env_num": 8, "evaluator_env_num": 5, "n_evaluator_episode": 5, "stop_value": 195},
        "reward_model": {
            "intrinsic_reward_type": "add",
            "intrinsic_reward_weight": None,
            "intrinsic_reward_rescale": 0.001,
            "learning_rate": 5e-4,
            "obs_shape": 4,
            "batch_size": 32,
            "update_per_collect": 4,
            "obs_norm": True,
            "obs_norm_clamp_min": -1,
            "obs_norm_clamp_max": 1,
            "clear_buffer_per_iters": 10,
        },
        "policy": {
            "cuda": True,
            "model": {
                "obs_shape": 4,
                "action_shape": 2,
                "encoder_hidden_size_list": [64, 64, 128],
                "critic_head_hidden_size": 128,
                "actor_head_hidden_size": 128,
            },
            "learn": {
                "epoch_per_collect": 10,
                "batch_size": 64,
                "learning_rate": 0.001,
                "value_weight": 0.4,
                "entropy_weight": 0.01,
                "clip_ratio": 0.3,
            },
            "collect": {"n_sample": 128, "unroll_len": 1, "discount_factor": 0.9, "gae_lambda": 0.8},
            "eval": {"evaluator": {"eval_freq": 100}},
        },
    }
    create = {
        "env": {"type": "cartpole"},
        "env_manager": {"type": "base"},
        "policy": {"type": "ppo"},
        "reward_model": {"type": "rnd"},
    }
    return easy(main), easy(create)


def test_a_pair_for_dqn(caplog):
    pair = dqn_pair()
    with caplog.at_level(logging.INFO, "guerdon"):
        cfg = load_serial(pair, max_env_step=40_000)
    assert pair == dqn_pair()  # nothing of theirs is changed
    assert cfg.exp_name == "cartpole_dqn_gail" and cfg.stop_value == 195
    assert (cfg.env.train.id, cfg.env.train.num_envs) == ("CartPole-v1", 8)
    assert (cfg.env.eval.id, cfg.env.eval.num_envs, cfg.learner.eval_episodes) == ("CartPole-v1", 5, 5)
    assert cfg.learner.algorithm == "dqn" and cfg.learner.network.hidden == (128, 128, 64)
    dqn = cfg.learner.dqn
    assert (dqn.gamma, dqn.lr, dqn.batch_size, dqn.buffer_size) == (0.97, 0.001, 64, 20000)
    assert (dqn.num_n_steps, cfg.steps_per_collect, dqn.updates_per_step) == (1, 64, 3 / 64)
    assert cfg.learner.eval_interval == 640  # 30 updates, 3 for each 64 steps
    assert (dqn.epsilon_start, dqn.epsilon_end, dqn.epsilon_fraction) == (0.95, 0.1, 0.5)
    assert cfg.reward_model == {
        "type": "gail",
        "hidden": [64],
        "batch_size": 64,
        "lr": 2e-3,
        "update_per_collect": 100,
        "data_path": "expert_data.pkl",
    }
    (notice,) = [record.message for record in caplog.records]
    for key in ("create_config.env.import_names", "reward_model.input_size", "policy.model.dueling"):
        assert key in notice


def test_a_pair_for_ppo():
    cfg = load_serial(list(ppo_pair()))
    ppo = cfg.learner.ppo
    assert cfg.learner.algorithm == "ppo" and cfg.learner.device == "auto"  # its `cuda: True`
    assert (ppo.num_steps, ppo.update_epochs, ppo.minibatch_size) == (16, 10, 64)
    assert (ppo.gamma, ppo.gae_lambda, ppo.lr) == (0.9, 0.8, 0.001)
    assert (ppo.clip_range, ppo.value_coef, ppo.entropy_coef) == (0.3, 0.4, 0.01)
    assert cfg.learner.eval_interval == 640  # 100 updates, 20 for each 128 steps
    assert cfg.reward_model["type"] == "rnd" and cfg.reward_model["normalize_obs"] is True
    assert "obs_shape" not in cfg.reward_model and "intrinsic_reward_type" not in cfg.reward_model
    mix = cfg.mix
    assert (mix.combine_mode, mix.env_reward_weight, mix.reward_weight) == ("weighted", 1.0, 0.001)


def test_updates_of_a_rollout_become_passes_over_it():
    main, create = ppo_pair()
    main["policy"]["learn"].pop("epoch_per_collect")
    main["policy"]["learn"]["update_per_collect"] = 6
    create["policy"]["type"] = "ppo_offpolicy"
    assert load_serial((main, create)).learner.ppo.update_epochs == 3  # two batches of 64 in 128 steps


def test_the_other_types():
    main, create = dqn_pair()
    main["reward_model"]["type"] = "guided_cost"
    assert load_serial((main, create)).reward_model["type"] == "gcl"
    main, create = ppo_pair()
    main["reward_model"]["intrinsic_reward_type"] = "assign"
    assert load_serial((main, create)).mix.combine_mode == "replace"
    main["rnd_reward_model"], main["episodic_reward_model"] = main.pop("reward_model"), {"type": "episodic"}
    create.pop("reward_model")
    ngu = load_serial((main, create))
    assert ngu.reward_model["type"] == "ngu" and ngu.reward_model["lr"] == 5e-4


def test_a_pair_for_sac():
    main, create = dqn_pair()
    create["policy"]["type"], create["env"]["type"] = "sac", "pendulum"
    main["policy"]["random_collect_size"] = 500
    main["policy"].pop("nstep")
    main["policy"]["learn"] = {
        "batch_size": 64,
        "learning_rate_q": 1e-3,
        "learning_rate_policy": 2e-3,
        "learning_rate_alpha": 3e-4,
        "target_theta": 0.01,
        "auto_alpha": False,
        "update_per_collect": 64,
    }
    cfg = load_serial((main, create))
    sac = cfg.learner.sac
    assert cfg.env.train.id == "Pendulum-v1"
    assert (sac.critic_lr, sac.actor_lr, sac.alpha_lr, sac.tau) == (1e-3, 2e-3, 3e-4, 0.01)
    assert (sac.gamma, sac.learning_starts, sac.updates_per_step, sac.learn_alpha) == (0.97, 500, 1.0, False)


@pytest.mark.parametrize(
    ("place", "key", "value", "complaint"),
    [
        ("policy.learn", "lerning_rate", 1.0, "did you mean 'policy.learn.learning_rate'"),
        ("policy.collect", "n_samples", 8, "did you mean 'policy.collect.n_sample'"),
        ("env", "colector_env_num", 8, "did you mean 'env.collector_env_num'"),
        ("reward_model", "intrinsic_reward_type", "new", "must be 'add' or 'assign'"),
        ("policy.learn", "batch_size", "many", "learner.dqn.batch_size must be a whole number"),
    ],
)
def test_what_is_wrong_is_named(place, key, value, complaint):
    main, create = dqn_pair()
    section = main
    for part in place.split("."):
        section = section[part]
    section[key] = value
    with pytest.raises(ConfigError, match=complaint):
        load_serial((main, create))


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        ("policy", "pppo", "no learner for DI-engine's policy.type 'pppo': did you mean 'ppo'"),
        ("policy", None, "policy.type is missing"),
        ("env", "cartpol", "did you mean 'cartpole'"),
        ("env", "minigrid", "env.env_id is missing"),
        ("env", None, "env.type is missing"),
        ("reward_model", None, "reward_model.type is missing"),
    ],
)
def test_what_is_missing_is_named(place, value, complaint):
    main, create = ppo_pair()
    create[place] = {} if value is None else {"type": value}
    with pytest.raises(ConfigError, match=complaint):
        from_di_engine(main, create)


def test_env_id_beats_the_type():
    main, create = dqn_pair()
    main["env"]["env_id"] = "Acrobot-v1"
    assert load_serial((main, create)).env.eval.id == "Acrobot-v1"


# Names and files


def test_a_name_and_overrides():
    cfg = load_serial("fixed_cartpole_gail", ["learner.ppo.lr=0.5", "reward_model.hidden=[8,8]", "seed=4"])
    assert cfg.exp_name == "fixed_cartpole_gail"  # unless the file says something else
    assert isinstance(cfg, SerialConfig) and cfg.env.train.id == "guerdon/FixedCartPole-v0"
    assert cfg.learner.ppo.lr == 0.5 and cfg.reward_model["hidden"] == [8, 8] and cfg.seed == 4
    assert load_serial("fixed_cartpole_gail", ["stop_value=3", "~stop_value"]).stop_value is None
    with pytest.raises(ConfigError, match="nothing to remove"):
        load_serial("fixed_cartpole_gail", ["~learner.sac.tau"])


def test_a_file_with_references(tmp_path):
    (tmp_path / "mine.yaml").write_text("exp_name: a\nreward_model: {type: gail, seed: '${seed}'}\nseed: 7\n")
    by_path, by_folder = load_serial(tmp_path / "mine.yaml"), load_serial("mine", config_path=str(tmp_path))
    assert by_path == by_folder and by_path.reward_model == {"type": "gail", "seed": 7}
    (tmp_path / "bad.yaml").write_text("exp_name: ${experiment}\n")
    with pytest.raises(ConfigError, match=r"refers to \$\{experiment\}, which does not exist"):
        load_serial("bad", config_path=str(tmp_path))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("fixed_cartpole_gale", "did you mean 'fixed_cartpole_gail'"),
        ({"lerner": {}}, "did you mean 'learner'"),
        (3, "not int"),
        (({}, {}, {}), "not tuple"),
    ],
)
def test_forms_that_do_not_exist(given, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_serial(given)


@pytest.mark.parametrize("name", sorted(file.stem for file in ZOO_CONF.glob("*.yaml")))
def test_every_config_of_the_package_loads(name):
    cfg = load_serial(name)
    assert cfg.reward_model["type"] in name and cfg.exp_name == name
    assert load_serial(cfg) == cfg
