"""`train_from_images`: a policy that observes small images, on a reward model that scores larger ones."""

import pytest
import torch

from guerdon.config import CollectConfig, EnvConfig, load_config
from guerdon.core.errors import DataError
from guerdon.data.collect.run import collect
from guerdon.training.arms import make_arm, run_arm
from guerdon.training.checkpoints import load_policy
from tests.training.conftest import short_settings
from tests.training.short_runs import demonstrate, lines

CAMERAS = ("base_camera", "wrist_camera")


def load(checkpoint, folder, data):
    """The config on tiny images, for a run of 400 steps."""
    settings = [setting.removeprefix("+") for setting in short_settings(checkpoint, folder)]
    for part in ("train", "eval"):
        settings += [f"env.{part}.init_params.obs_image_size=[16,16]"]
    settings += [f"learner.warm_start.data={data}", "learner.warm_start.epochs=2"]
    settings += [
        "learner.total_steps=400",
        "learner.ppo.update_epochs=2",
        "learner.warm_start.num_episodes=3",
    ]
    return load_config("train_from_images", settings)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Demonstrations of both cameras in the size that the policy observes."""
    env = EnvConfig(num_envs=4, init_params={"image_size": [16, 16]})
    place = tmp_path_factory.mktemp("shown") / "data"
    section = CollectConfig(
        save_dir=str(place), policy="scripted", cameras=CAMERAS, target_success=4, target_failure=0
    )
    assert collect(env, section, seed=0).complete
    return place


def test_as_it_stands_the_policy_sees_images_alone_and_no_env_reward():
    config = load_config("train_from_images", [])
    for env in (config.env.train, config.env.eval):
        assert env.init_params["obs_mode"] == "rgb" and tuple(env.init_params["cameras"]) == CAMERAS
        assert list(env.init_params["obs_image_size"]) == [48, 48]
        assert list(env.init_params["image_size"]) == [96, 96]  # what the demo's reward model scores
    assert config.env.train.init_params["reward"] == "none" and config.reward.use_reward_model
    assert config.learner.ppo.reference_coef == 0.0


def test_the_learned_reward_moves_the_policy_and_no_reward_leaves_it_as_it_was(checkpoint, shown, tmp_path):
    """Policy and values share what sees the images, so that values could move the policy without a reward."""
    config = load(checkpoint, tmp_path, shown)
    arms = {name: make_arm(config, tmp_path, name, 0) for name in ("start", "learned", "off")}
    weights = {}
    for name, arm in arms.items():
        summary = run_arm(arm, arms["start"].folder)
        assert summary["env_steps"] == (0 if name == "start" else 400)
        saved = load_policy(arm.folder)
        weights[name] = saved.learner.actor.state_dict()
        assert {camera for camera, _ in saved.learner.actor.spec.images} == set(CAMERAS)
        assert {shape for _, shape in saved.learner.actor.spec.images} == {(16, 16, 3)}
        assert saved.learner.actor.spec.state_size == 0
    scored = [
        entry["reward/frames_scored"]
        for entry in lines(arms["learned"].folder)
        if "reward/frames_scored" in entry
    ]
    assert sum(scored) == 400
    assert all(torch.equal(weights["off"][key], part) for key, part in weights["start"].items())
    moved = [key for key, part in weights["start"].items() if not torch.equal(weights["learned"][key], part)]
    assert any(key.startswith("encoder") for key in moved) and any(key.startswith("policy") for key in moved)


def test_demonstrations_of_another_size_are_refused(checkpoint, tmp_path):
    data = demonstrate(tmp_path / "demos", episodes=1)  # 24x24
    config = load(checkpoint, tmp_path, data)
    arm = make_arm(config, tmp_path, "start", 0)
    with pytest.raises(DataError, match="the policy observes base_camera"):
        run_arm(arm, arm.folder)
