"""RLinf's own config files, by files of the same shape."""

from pathlib import Path

import pytest
import yaml

from guerdon.config import RewardModelConfig, load_tree, to_plain
from guerdon.config.load import load_config, load_rlinf
from guerdon.core.errors import ConfigError

ENV = """
env_type: maniskill
total_num_envs: null
wrap_obs_mode: simple
max_episode_steps: 50
max_steps_per_rollout_epoch: 50
ignore_terminations: False
video_cfg: {save_video: False, video_base_dir: "${runner.logger.log_path}/video"}
init_params:
  id: PickCube-v1
  num_envs: null
  obs_mode: state
  control_mode: None
  sim_backend: gpu
  sim_config: {sim_freq: 100, control_freq: 20}
  max_episode_steps: ${..max_episode_steps}
"""
ROBOT = """
env_type: realworld
max_episode_steps: 100
use_spacemouse: True
main_image_key: wrist_1
init_params: {id: PegInsertionEnv-v1, num_envs: null}
"""
TRAINING = """
defaults:
  - env/task@env.train
  - env/task@env.eval
  - model/mlp_policy@actor.model
  - hybrid_engines/fsdp@actor.fsdp_config
  - override hydra/job_logging: stdout
hydra: {run: {dir: .}, searchpath: ["file://${oc.env:EMBODIED_PATH}/config/"]}
cluster:
  num_nodes: 1
  component_placement: {actor: 0-0, env: 0-0, rollout: 0-0, reward: 0-0}
runner:
  task_type: embodied
  logger: {log_path: results, project_name: rlinf, experiment_name: a_run, logger_backends: [tensorboard]}
  max_epochs: 100
  max_steps: -1
  val_check_interval: 20
  save_interval: -1
  resume_dir: null
env:
  group_name: EnvGroup
  train:
    total_num_envs: 8
    use_full_state: True
    init_params: {obs_mode: rgb, control_mode: pd_joint_delta_pos, sensor_configs: {width: 96, height: 64}}
  eval: {total_num_envs: 4, use_full_state: True, ignore_terminations: True, init_params: {obs_mode: rgb}}
rollout: {group_name: RolloutGroup, model: {precision: "${actor.model.precision}"}}
critic: {use_critic_model: False}
reward:
  use_reward_model: True
  group_name: RewardGroup
  reward_mode: terminal
  reward_threshold: 0.5
  reward_weight: 1.0
  env_reward_weight: 0.25
  model:
    model_path: null
    model_type: resnet
    pretrained: False
    arch: resnet18
    hidden_dim: null
    image_size: [3, 224, 224]
"""
PPO = """
algorithm:
  update_epoch: 8
  adv_type: gae
  loss_type: actor_critic
  normalize_advantages: True
  clip_ratio_high: 0.3
  kl_beta: 0.0
  gamma: 0.8
  gae_lambda: 0.9
actor:
  seed: 7
  global_batch_size: 6400
  optim: {lr: 3.0e-4, clip_grad: 0.6, adam_beta1: 0.9}
"""
SAC = """
algorithm:
  update_epoch: 32
  adv_type: embodied_sac
  gamma: 0.9
  tau: 0.01
  critic_actor_ratio: 4
  entropy_tuning: {alpha_type: fixed_alpha, initial_alpha: 0.01, target_entropy: -4, optim: {lr: 1.0e-4}}
  replay_buffer: {sample_window_size: 200, min_buffer_size: 2, cache_size: 100}
  demo_buffer: {load_path: /path/to/demo_data}
actor:
  seed: 7
  global_batch_size: 128
  model: {num_q_heads: 10}
  optim: {lr: 2.0e-4}
  critic_optim: {lr: 3.0e-4}
"""
FIT = """
runner:
  task_type: sft
  logger: {log_path: logs, project_name: rlinf, logger_backends: [tensorboard]}
  max_epochs: 80
  val_check_interval: 50
  save_interval: 20
  early_stop: {enabled: true, patience: 5, min_delta: 0.001, monitor: val_loss}
data: {train_data_paths: train.pt, val_data_paths: val.pt, num_workers: 4}
actor:
  training_backend: fsdp
  micro_batch_size: 32
  global_batch_size: 64
  seed: 42
  model: {model_type: resnet, model_path: null, arch: resnet101, pretrained: True, dropout: 0.1}
  optim: {lr: 1.0e-4, weight_decay: 1.0e-5, clip_grad: 1.0, lr_warmup_steps: 100, warmup_style: constant}
  fsdp_config: {strategy: fsdp}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EMBODIED_PATH", raising=False)
    for name, text in {"env/task": ENV, "model/mlp_policy": "precision: '32'\nobs_dim: 42"}.items():
        place = tmp_path / f"{name}.yaml"
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
    return tmp_path


def written(folder, name, *texts):
    path = folder / f"{name}.yaml"
    path.write_text("\n".join(texts))
    return path


def test_a_training_with_ppo(folder, caplog):
    caplog.set_level("INFO", "guerdon")
    cfg = load_rlinf(written(folder, "a_ppo", TRAINING, PPO), ["learner.ppo.lr=0.5"])
    assert cfg.seed == 7 and cfg.runner.experiment_name == "a_run" and cfg.runner.output_dir == "results"
    train, measured = cfg.env.train, cfg.env.eval
    assert (train.env_type, train.id, train.num_envs, train.max_episode_steps) == (
        "maniskill",
        "PickCube-v1",
        8,
        50,
    )
    assert train.init_params == {
        "obs_mode": "state",
        "render_mode": "rgb_array",
        "control_mode": "pd_joint_delta_pos",
        "image_size": [64, 96],
        "sim_config": {"sim_freq": 100, "control_freq": 20},
        "terminate_on_success": True,
    }
    assert measured.num_envs == 4 and "terminate_on_success" not in measured.init_params
    ppo = cfg.learner.ppo
    assert (ppo.num_steps, ppo.update_epochs, ppo.minibatch_size, ppo.gamma) == (50, 8, 400, 0.8)
    assert (ppo.clip_range, ppo.gae_lambda, ppo.max_grad_norm, ppo.lr) == (0.3, 0.9, 0.6, 0.5)
    assert (cfg.learner.total_steps, cfg.learner.eval_interval, cfg.learner.save_interval) == (
        40_000,
        8_000,
        40_000,
    )
    reward = cfg.reward
    assert reward.use_reward_model and reward.reward_mode == "terminal" and reward.reward_threshold == 0.5
    assert (reward.combine_mode, reward.reward_weight, reward.env_reward_weight) == ("weighted", 1.0, 0.25)
    assert (reward.model.arch, reward.model.width, reward.model.image_size) == ("resnet18", 64, (3, 224, 224))
    assert reward.model.use_pretrain is False and not cfg.asynchronous.enabled
    text = caplog.text
    for name in ("hybrid_engines/fsdp", "without meaning here", "rollout.group_name", "env.*.wrap_obs_mode"):
        assert name in text


def test_an_asynchronous_ppo_is_said_to_be_synchronous(folder, caplog):
    text = PPO.replace("loss_type: actor_critic", "loss_type: decoupled_actor_critic")
    with caplog.at_level("INFO", "guerdon"):
        cfg = load_rlinf(written(folder, "a_run_async", TRAINING, text))
    assert cfg.learner.algorithm == "ppo" and not cfg.asynchronous.enabled
    assert "PPO learns between its rollouts here" in caplog.text


def test_a_training_with_sac(folder):
    cfg = load_rlinf(written(folder, "a_sac_async", TRAINING, SAC))
    sac = cfg.learner.sac
    assert cfg.learner.algorithm == "sac" and cfg.asynchronous.enabled
    assert (sac.gamma, sac.tau, sac.actor_every, sac.num_critics, sac.batch_size) == (0.9, 0.01, 4, 10, 128)
    assert (sac.learn_alpha, sac.initial_alpha, sac.target_entropy, sac.alpha_lr) == (False, 0.01, -4, 1e-4)
    assert (sac.actor_lr, sac.critic_lr, sac.buffer_size, sac.learning_starts) == (2e-4, 3e-4, 10_000, 100)
    assert sac.updates_per_step == 32 / 400 and sac.prior_data is None


@pytest.mark.parametrize("text", [TRAINING + PPO, FIT], ids=["training", "fit"])
def test_trackers(folder, text, caplog):
    caplog.set_level("INFO", "guerdon")
    cfg = load_rlinf(written(folder, "plain", text))
    assert (cfg.runner.logger.backends, cfg.runner.logger.project_name) == (("tensorboard",), "guerdon")
    named = text.replace("logger_backends: [tensorboard]", "logger_backends: [wandb, swanlab]")
    cfg = load_rlinf(written(folder, "named", named))
    assert (cfg.runner.logger.backends, cfg.runner.logger.project_name) == (("wandb",), "rlinf")
    assert "runner.logger.logger_backends ('swanlab')" in caplog.text
    odd = load_rlinf(written(folder, "odd", text.replace("[tensorboard]", "{a: 3}")))
    assert odd.runner.logger.backends == () and "logger_backends ({'a': 3})" in caplog.text


def test_a_robot(folder):
    (folder / "env" / "task.yaml").write_text(ROBOT)
    tree = yaml.safe_load(TRAINING)
    tree["env"] = {
        "train": {"total_num_envs": 1, "override_cfg": {"is_dummy": False, "random_xy_range": 0.02}},
        "eval": {"override_cfg": {"target_ee_pose": "TARGET_EE_POSE"}},
    }
    tree["reward"] |= {"standalone_realworld": True, "use_reward_prob": True, "reward_mode": "per_step"}
    machines = [{"label": "franka", "node_ranks": 1, "env_configs": [{"python_interpreter_path": "/p"}]}]
    machines[0]["hardware"] = {"type": "Franka", "configs": [{"robot_ip": "10.0.0.2", "node_rank": 1}]}
    tree["cluster"]["node_groups"] = machines
    cfg = load_rlinf(written(folder, "a_robot", yaml.safe_dump(tree), SAC))
    assert cfg.env.train.env_type == "robot" and cfg.env.train.operator == "spacemouse"
    assert cfg.env.train.override_cfg == {
        "random_xy_range": 0.02,
        "max_episode_steps": 100,
        "robot_ip": "10.0.0.2",
    }
    assert cfg.env.eval.override_cfg == {"max_episode_steps": 100, "robot_ip": "10.0.0.2"}
    assert cfg.reward.standalone and cfg.reward.reward_type == "continuous"


def test_a_fit(folder):
    path = written(folder, "reward_training", FIT)
    for cfg in (load_rlinf(path), load_config("reward_training", (), folder)):
        fit = cfg.fit
        assert fit.only and (fit.epochs, fit.global_batch_size, fit.micro_batch_size) == (80, 64, 32)
        assert (fit.data.path, fit.data.num_workers, cfg.seed) == ("train.pt", 4, 42)
        assert (fit.optim.optimizer, fit.optim.lr, fit.optim.weight_decay) == ("adam", 1e-4, 1e-5)
        assert (fit.lr_sched.name, fit.lr_sched.warmup_steps) == ("constant", 100)
        assert (fit.early_stop.patience, fit.early_stop.min_delta, fit.best_by) == (5, 0.001, "val_loss")
        assert (fit.val_check_interval, fit.save_interval) == (50, 20)
        assert (cfg.reward.model.arch, cfg.reward.model.dropout) == ("resnet101", 0.1)


def test_collecting(folder):
    tree = yaml.safe_load(TRAINING)
    tree["env"]["eval"]["data_collection"] = {"enabled": True, "save_dir": "${runner.logger.log_path}/kept"}
    tree["env"]["eval"]["data_collection"] |= {"export_format": "pickle", "only_success": True, "fps": 10}
    cfg = load_rlinf(written(folder, "a_collect", yaml.safe_dump(tree), PPO))
    assert cfg.collect.enabled and cfg.collect.save_dir == "results/kept"
    assert (cfg.collect.format, cfg.collect.target_failure) == ("pkl-episode", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": {"adv_type": "grpo"}}, "'grpo' has no counterpart"),
        ({"algorithm": {"adv_type": "gae", "loss_type": "embodied_dagger"}}, "'embodied_dagger' has no"),
        ({"algorithm": {"adv_type": "gae", "loss_type": "embodied_sac"}}, "'embodied_sac' has no"),
        (
            {"actor": {"model": {"model_type": "openvla"}}},
            "policy .* 'openvla' has no counterpart; mlp",
        ),
        ({"actor": {"model": {"q_head_type": "crossq"}}}, "'crossq' has no counterpart"),
        ({"reward": {"model": {"model_type": "history_vlm"}}}, "'history_vlm' has no counterpart"),
        ({"env": {"train": {"env_type": "libero"}}}, "'libero' has no counterpart"),
        ({"reward": {"reward_mod": 3}}, "unknown setting of RLinf, 'reward.reward_mod'"),
        ({"surprise": 3}, "unknown setting of RLinf, 'surprise'"),
        ({"actor": {"seed": "${nowhere.at.all}"}}, "nowhere.at.all"),
        (
            {"env": {"eval": {"data_collection": {"enabled": True, "export_format": "zarr"}}}},
            "'zarr' is not written",
        ),
    ],
)
def test_what_has_no_counterpart(change, message, folder):
    tree = yaml.safe_load(TRAINING + PPO)
    for section, value in change.items():
        tree[section] = {**tree.get(section, {}), **value} if isinstance(value, dict) else value
    with pytest.raises(ConfigError, match=message):
        load_rlinf(written(folder, "a_run", yaml.safe_dump(tree)))


def test_a_missing_file(folder):
    with pytest.raises(ConfigError, match="there is no config of RLinf at"):
        load_rlinf(folder / "absent.yaml")


def test_a_value_that_is_none_is_named(folder):
    with pytest.raises(ConfigError, match=r"a_ppo\.yaml holds a value that is none"):
        load_rlinf(written(folder, "a_ppo", TRAINING, PPO.replace("seed: 7", "seed: !!int x")))


# The spellings of RLinf's guides


def test_images_of_the_policy_and_the_collector_are_those_of_the_reward_model():
    tree = {
        "actor": {"model": {"image_keys": ["base_camera"], "image_size": [3, 64, 48]}},
        "reward": {
            "reward_model": {"image_keys": ["base_camera"], "image_size": [3, 64, 48]},
            "data_collection": {"image_size": [3, 64, 48], "image_keys": ["base_camera"]},
        },
    }
    cfg = load_tree(tree)
    assert cfg.env.train.init_params == cfg.env.eval.init_params == {"image_size": [64, 48]}
    assert cfg.reward.model.image_size == (3, 64, 48)
    with pytest.raises(
        ConfigError, match=r"actor\.model\.image_size is \[3, 32, 32\], and reward\.model\.image_size"
    ):
        load_tree(tree, ["actor.model.image_size=[3,32,32]"])
    with pytest.raises(ConfigError, match=r"reward\.data_collection\.image_size is"):
        load_tree(tree, ["reward.data_collection.image_size=[3,32,32]"])


def test_a_bare_stage_one_collects():
    folder = Path(__file__).parent.parent.parent / "examples" / "embodiment" / "config"
    assert load_config("maniskill_ppo_cnn", [], folder).reward.collect_data
    assert load_config("train_reward_model", [], folder).fit.export_path == "./checkpoints/reward_model.pt"


def test_what_was_given_is_told_from_defaults():
    given = load_tree({"reward": {"model": {"image_size": [3, 128, 128]}}}).reward.model
    assert given == RewardModelConfig() and given.given == {"image_size"}
    assert load_tree({}).reward.model.given == set()
    older = load_tree({"reward": {"reward_model": {"hidden_dim": 8}}}, ["reward.model.dropout=0.1"])
    assert older.reward.model.given == {"hidden_dim", "dropout"}  # not what the block implies
    whole = load_tree(
        {"reward": {"model": to_plain(RewardModelConfig())}}
    )  # as `config.yaml` of a run has it
    assert whole.reward.model.given is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("- env/task@env.train", "- wrong", "names itself"),
        ("- env/task@env.train", "- ../elsewhere", "not beside it"),
        ("- env/task@env.train", "- /etc/elsewhere", "not beside it"),
        (
            "max_epochs: 100",
            "max_epochs: many",
            "runner.max_epochs must be a number of at least 1",
        ),
        ("total_num_envs: 8", "total_num_envs: 0", "total_num_envs must be a number of at least 1"),
        ("update_epoch: 8", "update_epoch: [8]", "algorithm.update_epoch must be a number"),
        ("adv_type: gae", "adv_type: [gae]", "has no counterpart"),
        ("rollout: {", "hydra: [1]\nalgorithm: 3\nrollout: {", "RLinf's algorithm None"),
        ("num_nodes: 1", "node_groups: [1]", "cluster.node_groups must be a list of sections"),
        ("use_reward_model: True", "model: *a", "undefined alias 'a'"),
    ],
)
def test_wrong_files_are_named_in_one_line(old, new, message, folder):
    text = TRAINING + ("" if "algorithm: 3" in new else PPO)
    assert old in text
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")) as caught:
        load_rlinf(written(folder, "wrong", text.replace(old, new)))
    assert "\n" not in str(caught.value)


def test_a_long_name_in_the_defaults_and_a_defaults_that_is_no_list(folder):
    load_rlinf(written(folder, "long", TRAINING.replace("- env/task@env.train", f"- {'x' * 280}"), PPO))
    with pytest.raises(ConfigError, match="`defaults` must be a list, not 3"):
        load_rlinf(written(folder, "number", "defaults: 3\nrunner: {}\nactor: {}\nrollout: {}\n"))


def test_few_files_do_not_stand_for_many(folder):
    for number in range(8):
        text = f"defaults: [{', '.join([f'f{number + 1}'] * 8)}]\nrunner: {{}}\n"
        written(folder, f"f{number}", text)
    written(folder, "f8", "runner: {}\n")
    with pytest.raises(ConfigError, match="made of more than 64 files"):
        load_rlinf(folder / "f0.yaml")
