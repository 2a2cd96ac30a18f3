"""Outcomes on a fitted reward: policies that never see the env's reward solve the task; cheats are seen."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecNormalize

from guerdon.agents.cloning import demonstrations
from guerdon.agents.networks import ObsSpec
from guerdon.cli.demo import run_demo
from guerdon.config import RewardConfig, RewardModelConfig, load_config
from guerdon.envs import TabletopVectorEnv
from guerdon.fit import fit_reward_model
from guerdon.serve import ImageRewardWorker
from guerdon.training.runs import warm_start
from guerdon.training.trainer import EmbodiedRunner
from guerdon.wrappers import GymVectorToSB3, LearnedRewardVecEnv
from tests.monitoring.test_monitor import CFG, make, play, watch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
REAL_PICTURES = True
EPISODE = 50


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What `make demo` does, more briefly and on smaller pictures: summary and folder."""
    torch.set_num_threads(1)
    output = tmp_path_factory.mktemp("demo")
    briefly = ["learner.total_steps=144_000", "learner.eval_interval=144_000", "fit.epochs=6"]
    briefly += ["env.train.init_params.image_size=[64,64]"]
    cameras = "collect.cameras=[base_camera,base_camera@goal,wrist_camera]"
    summary, _ = run_demo([f"runner.output_dir={output}", *briefly, cameras])
    return summary, Path(summary["folder"])


@pytest.fixture(scope="module")
def checkpoint(demo):
    """A model that looks at every frame, and at all of it."""
    settings = ["fit.epochs=4", "fit.data.num_samples_per_episode=18", f"fit.data.path={demo[1] / 'data'}"]
    settings += ["fit.calibration.target_false_positive_rate=0.002", "reward.model.precision=int8"]
    config = load_config("train_reward", [*settings, "reward.model.image_size=[3,128,128]"])
    return fit_reward_model(config.reward.model, config.fit, folder=demo[1] / "fitted").checkpoint


@pytest.fixture(scope="module")
def worker(checkpoint):
    model = RewardModelConfig(checkpoint_path=str(checkpoint), precision="int8")
    worker = ImageRewardWorker(RewardConfig(model=model), device="cpu")
    worker.init_worker()
    return worker


@pytest.mark.outcome
def test_the_demo_learns_from_the_learned_reward_alone(demo):
    """From a weak start, beside the same training with every reward zero, which gains nothing."""
    summary, _ = demo
    stage3 = summary["stage3"]
    assert summary["stage2"]["val_auc"] > 0.99
    assert stage3["episodes"] >= 100
    start = stage3["start_success_rate"]
    assert start <= 0.4
    assert stage3["success_rate"] >= start + 0.4
    assert stage3["true_success_rate"] >= start + 0.4
    assert stage3["off_success_rate"] == start
    assert stage3["alarms"] == []
    lines = (Path(stage3["run"]) / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line) for line in lines]
    assert {entry["rollout/env_rewards"] for entry in losses if "rollout/env_rewards" in entry} == {0.0}


def on_learned_reward(checkpoint, data, name, *more):
    """The config of a policy that is cloned first."""
    settings = [
        "+env.train.init_params.reward=none",
        "reward.use_reward_model=true",
        f"reward.model.checkpoint_path={checkpoint}",
        "reward.model.precision=int8",
        f"learner.warm_start.data={data}",
    ]
    return load_config(name, [*settings, *more])


def test_a_policy_on_images_trains_on_the_learned_reward_and_stays_good(demo, checkpoint, tmp_path):
    more = ["learner.total_steps=3200", "learner.warm_start.epochs=12", "learner.eval_episodes=200"]
    config = on_learned_reward(checkpoint, demo[1] / "data", "train_rgb", *more)
    summary = EmbodiedRunner(config, tmp_path).run()
    assert summary["episodes"] >= 200
    assert summary["success_rate"] >= 0.7  # 160,000 steps come to 90%: benchmarks/bench_images
    assert summary["alarms"] == []
    # Cloning alone gives as much, and so few steps do not move it, not even with the reward turned
    # round: that the reward steers is shown below, on states, where a few iterations suffice.


@pytest.mark.outcome
def test_the_learned_reward_steers_the_policy(demo, checkpoint, tmp_path):
    """The same clone in the same episodes, towards what the model calls success and away from it."""
    success, start = {}, None
    for sign in (1, -1):
        more = ["learner.warm_start.epochs=30", "learner.ppo.reference_coef=0"]
        more.append(f"reward.success_reward={sign}")
        config = on_learned_reward(checkpoint, demo[1] / "data", "train", *more)
        runner = EmbodiedRunner(config, tmp_path)
        if start is None:
            warm_start(runner.learner, config, runner.spaces, runner.envs.facts.control_mode)
            start = copy.deepcopy(runner.learner.state_dict())
        runner.learner.load_state_dict(start)
        runner.loop.reset(0)
        success[sign] = [runner.loop.advance(part / 8).metrics["env/success_once"] for part in range(8)]
        runner.env_worker.close()
        runner.engine.close()
    assert success[1][0] == success[-1][0]  # from the same start, 0.53 to 0.73
    # Seeds 0, 1, 2 came to 0.81, 0.70, 0.71 towards it and to 0.20, 0.14, 0.16 away from it.
    towards, away = (float(np.mean(success[sign][-2:])) for sign in (1, -1))
    assert towards >= 0.55 and away <= 0.4, success


# Stable-Baselines3


def success_once(model, scaled, episodes=200, seed=10_000):
    """Share of fresh episodes in which the environment itself saw success."""
    envs = TabletopVectorEnv(episodes, autoreset_mode="Disabled")
    obs, _ = envs.reset(seed=seed)
    once = np.zeros(episodes, np.bool_)
    for _ in range(EPISODE):
        obs, *_, info = envs.step(model.predict(scaled.normalize_obs(obs), deterministic=True)[0])
        once |= info["success"]
    return once.mean()


def clone_successes(model, obs, wanted, updates=700):
    """A moderate start: imitate the successes, but not for long."""
    optimizer = torch.optim.Adam(model.policy.parameters(), 3e-4)
    torch.manual_seed(0)
    for _ in range(updates):
        rows = torch.randint(len(wanted), (256,))
        mean = model.policy.get_distribution(obs[rows]).distribution.mean
        loss = (mean - wanted[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.xfail(
    torch.backends.cpu.get_cpu_capability() == "AVX2",
    reason="a known miss: with the rounding of AVX2 this seed ends at 0.665",
    raises=AssertionError,
)
@pytest.mark.outcome
def test_ppo_of_stable_baselines_learns_from_the_learned_reward_alone(demo, worker):
    envs = TabletopVectorEnv(64, autoreset_mode="SameStep", reward="none")
    scaled = VecNormalize(
        LearnedRewardVecEnv(GymVectorToSB3(envs), worker), norm_reward=False, training=False
    )
    obs, wanted = demonstrations(demo[1] / "data", ObsSpec(state_size=20))
    scaled.obs_rms.update(obs["state"].numpy())
    model = PPO(
        "MlpPolicy",
        scaled,
        n_steps=EPISODE,
        batch_size=800,
        n_epochs=10,
        gamma=0.95,
        learning_rate=lambda left: 6e-4 * left,
        policy_kwargs={"net_arch": [128, 128], "log_std_init": -1.6},
        seed=0,
        device="cpu",
    )
    clone_successes(model, torch.from_numpy(scaled.normalize_obs(obs["state"].numpy())).float(), wanted)
    before = success_once(model, scaled)
    model.learn(64_000)
    after = success_once(model, scaled)
    assert before < 0.75
    assert after >= 0.8


# The monitor


def test_the_honest_expert_raises_nothing_in_ten_seeds(worker, tmp_path):
    manager = worker.manager
    for seed in range(10):
        monitor = make(tmp_path, contract=manager.contract, threshold=manager.threshold)
        assert watch(monitor, play(manager, seed, cheat=False)) == []
        seen = monitor.metrics()
        assert seen["monitor/success_gap"] < 0.2 and seen["monitor/drift"] < 1.5, seen


@pytest.fixture(scope="module")
def fooled(worker):
    """A threshold at which nine in ten of the cheat's episodes fire: how far a fit is fooled is chance."""
    (cheat,) = play(worker.manager, 99, cheat=True, num_batches=1)
    return float(np.quantile(cheat.prob_success.max(axis=0), 0.1))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_decoy_cheat_raises_the_alarm(worker, fooled, tmp_path, seed):
    manager, batches = worker.manager, list(play(worker.manager, seed, cheat=True))

    def raised(threshold):
        monitor = make(tmp_path, contract=manager.contract, threshold=threshold)
        return watch(monitor, batches)

    in_time = [alarm.name for number, alarm in raised(manager.threshold) if number == CFG.patience - 1]
    assert "wrong_fires" in in_time
    found = raised(fooled)
    assert "success_gap" in [alarm.name for number, alarm in found if number == CFG.patience - 1]
    gap = next(alarm for _, alarm in found if alarm.name == "success_gap")
    assert gap.value > 0.6
    assert np.asarray(Image.open(gap.frames[0])).shape == (64, 64, 3)
