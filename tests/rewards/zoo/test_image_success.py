"""The image success classifier as a model of the zoo, and policies that learn from nothing else."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from benchmarks import zoo_images
from guerdon.core.errors import ConfigError, DataError
from guerdon.envs.classic import from_above
from guerdon.models import Contract, ResNetRewardModel, save_checkpoint
from guerdon.rewards import StepBatch, create_reward_model
from guerdon.training.serial import as_run, make_env, resolved, serial_pipeline_reward_model, shapes_of
from guerdon.training.trainer import EmbodiedRunner
from guerdon.wrappers import LearnedRewardWrapper
from tests.rewards.zoo.zoo_tasks import BASELINES, run
from tests.training.serial_tools import POINT_REACH, small

SHAPE = (16, 16, 3)


def fitted(folder, **settings):
    """A classifier with weights that tell images apart."""
    torch.manual_seed(0)
    model = ResNetRewardModel(arch="resnet10", width=8, image_size=(3, 16, 16), **settings)
    torch.nn.init.normal_(model.classifiers[0][-1].weight, std=2.0)
    save_checkpoint(folder / "fitted", model, Contract.of(model, threshold=0.5))
    return model.eval(), str(folder / "fitted")


def images(count=12):
    return np.random.default_rng(0).integers(0, 256, (count, *SHAPE)).astype(np.uint8)


def rows(frames):
    count = len(frames)
    return StepBatch(
        obs=torch.zeros(count, *SHAPE),
        actions=torch.zeros(count, 2),
        next_obs=torch.from_numpy(frames.astype(np.float32)),
        env_rewards=torch.zeros(count),
        terminated=torch.zeros(count, dtype=torch.bool),
        truncated=torch.zeros(count, dtype=torch.bool),
    )


def made(path, **settings):
    section = {"type": "image_success", "checkpoint_path": path, "obs_shape": SHAPE, "action_size": 2}
    return create_reward_model({**section, "discrete_actions": False, **settings})


def test_the_reward_is_the_classifiers_verdict_on_the_reached_frame(tmp_path):
    model, path = fitted(tmp_path)
    wanted = model.predict(images()).prob_success
    zoo = made(path)
    assert torch.allclose(zoo.estimate(rows(images())).env_rewards, wanted, atol=1e-6)
    assert wanted.std() > 0.01  # it does tell them apart
    middle = float(wanted.sort().values[5:7].mean())  # between two frames: batches differ in the last digit
    binary = made(path, reward_type="binary", reward_threshold=middle, success_reward=5.0, fail_reward=-1.0)
    said = binary.estimate(rows(images())).env_rewards
    assert torch.equal(said, torch.where(wanted > middle, 5.0, -1.0))
    assert made(path).threshold == 0.5 and zoo.train() == {}


class Pictures(gym.Env):
    """Shows one image after the other."""

    action_space = gym.spaces.Box(-1.0, 1.0, (2,))

    def __init__(self, camera: str | None) -> None:
        self.camera, self.number = camera, 0
        space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
        self.observation_space = space if camera is None else gym.spaces.Dict({camera: space})

    def reset(self, *, seed=None, options=None):
        self.number = 0
        return self.shown(), {}

    def step(self, action):
        self.number += 1
        return self.shown(), 0.0, False, self.number == 5, {}

    def shown(self):
        frame = images()[self.number]
        return frame if self.camera is None else {self.camera: frame, "state": np.zeros(2)}


@pytest.mark.parametrize("camera", [None, "base_camera"])
def test_through_the_wrapper(tmp_path, camera):
    model, path = fitted(tmp_path)
    env = LearnedRewardWrapper(Pictures(camera), made(path))
    env.reset()
    rewards = [env.step(np.zeros(2, np.float32))[1] for _ in range(5)]
    assert rewards == pytest.approx(model.predict(images()[1:6]).prob_success.tolist(), abs=1e-6)


def test_what_is_refused(tmp_path):
    _, path = fitted(tmp_path)
    with pytest.raises(ConfigError, match="checkpoint_path is missing"):
        made(None)
    with pytest.raises(DataError, match="no such checkpoint"):
        made(str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"0 to 255, these have 0 to 1"):
        made(path).estimate(rows(images() // 200))
    flat = rows(images())
    flat = StepBatch(**{**flat.parts(), "obs": torch.zeros(12, 4), "next_obs": torch.zeros(12, 4)})
    with pytest.raises(DataError, match=r"takes images \[H, W, C\], not observations of shape \[4\]"):
        made(path).estimate(flat)
    _, stacked = fitted(tmp_path / "stacked", num_frames=2)
    with pytest.raises(ConfigError, match="single frames of one camera"):
        made(stacked)
    _, resting = fitted(tmp_path / "resting", only_at_rest=True)
    with pytest.raises(ConfigError, match="robots at rest alone"):
        made(resting)


# In the pipelines


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Fitted by stage 2 to pictures of random play; the checkpoint, and its score on held-out episodes."""
    return zoo_images.fitted(tmp_path_factory.mktemp("pictures"))


@pytest.mark.slow
@pytest.mark.outcome
def test_a_policy_learns_from_pictures_of_success_alone(classifier):
    checkpoint, auc = classifier
    assert auc > 0.99
    settings = zoo_images.settings()
    settings["reward_model"]["checkpoint_path"] = checkpoint
    result = run(settings)  # the env reward is NaN
    assert result.last_return >= zoo_images.TARGET
    assert result.evaluations[-1][2].success_at_end >= 0.95


@pytest.mark.parametrize("control", BASELINES)
@pytest.mark.slow
def test_without_the_classifier_the_same_run_fails(control):
    result = run(zoo_images.settings(), control=control)
    assert result.last_return < 0.5 * zoo_images.TARGET
    assert result.evaluations[-1][2].success_at_end < 0.3


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_pipelines_show_the_frame_that_an_action_led_to(tmp_path, algorithm):
    tree = small(algorithm, POINT_REACH, reward_model={"type": "image_success"}, steps_per_collect=128)
    tree["env"]["train"]["init_params"] = {"horizon": 5}  # most rollouts have final frames in them
    cfg = resolved(tree)
    env = make_env(cfg)
    model = made(fitted(tmp_path)[1], **shapes_of(env))
    runner = EmbodiedRunner(as_run(cfg), tmp_path / "run", env=env, reward_model=model)
    loop, frames = runner.loop, []
    score = model.network.scorer.score_some

    def noted(shown, start, stop):
        frames.append(shown[model.obs_key][start:stop].copy())
        return score(shown, start, stop)

    model.network.scorer.score_some = noted
    loop.reset(0)
    prob = loop.advance(0.0).for_monitor.prob_success
    seen = np.concatenate(frames)
    if algorithm == "ppo":
        next_obs = loop.rollout.next_obs.numpy()
        done = (loop.rollout.terminated | loop.rollout.truncated).numpy()
    else:
        chunks = [item.chunk for item in loop._stored]
        next_obs = np.stack([chunk.final_obs.get(0, chunk.last_obs) for chunk in chunks])
        done = np.concatenate([chunk.done for chunk in chunks])
    assert seen.dtype == np.uint8 and seen.shape == (128, *SHAPE) and done.sum() >= 24
    # what each action led to, also where the episode ended
    assert np.array_equal(seen, from_above(next_obs.reshape(128, -1)[:, :2]))
    verdicts = model.network(torch.from_numpy(seen)).numpy()
    assert np.allclose(prob.reshape(-1), verdicts, atol=1e-6)
    if algorithm == "sac":  # scores are kept in the replay buffer, pictures are not
        (held,) = loop.replay.parts
        assert set(held._steps) == {
            "actions",
            "env_rewards",
            "terminated",
            "truncated",
            "final_slot",
            "prob_success",
        }
        assert np.allclose(held._steps["prob_success"][:32].reshape(-1), verdicts, atol=1e-6)
    else:
        assert np.allclose(loop.rollout.training_rewards.numpy().reshape(-1), verdicts, atol=1e-6)
    runner.envs.close()


def test_a_camera_in_the_observation_is_used(tmp_path):
    """Tabletop with state and picture: the policy sees both, the classifier the picture."""
    _, path = fitted(tmp_path)
    tabletop = {
        "id": "guerdon/Tabletop-v0",
        "num_envs": 4,
        "init_params": {"obs_mode": "state+rgb", "image_size": [16, 16]},
    }
    tree = small()
    tree["env"] = {"train": tabletop, "eval": {**tabletop, "num_envs": 1}}
    tree["reward_model"] = {"type": "image_success", "checkpoint_path": path}
    tree["learner"] |= {"total_steps": 128, "eval_interval": 128, "eval_episodes": 1}
    result = serial_pipeline_reward_model(tree)
    assert result.env_steps == 128 and result.train_iter == 1
    sac = {**tree, "learner": {**tree["learner"], "algorithm": "sac", "total_steps": 192}}
    assert serial_pipeline_reward_model(sac).train_iter > 0
