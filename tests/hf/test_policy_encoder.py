"""`learner.network.encoder: hf:PATH`: policies that look with a frozen pretrained encoder."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch

from guerdon.agents.networks import ObsEncoder, ObsSpec
from guerdon.agents.policies import ActorCritic
from guerdon.agents.sac import SAC
from guerdon.cli.train import train
from guerdon.config import NetworkConfig, SACConfig, load_config
from guerdon.core.errors import ConfigError, DataError
from guerdon.models import build_model
from guerdon.training.checkpoints import load_policy
from guerdon.training.fit_run import _job, _placeable
from tests.agents.batches import random_batch
from tests.hf.test_hf_encoder import section
from tests.hf.tiny import configs, save

SPEC = ObsSpec(state_size=5, images=(("front", (16, 16, 3)),))
ACTIONS = gym.spaces.Box(-1, 1, (3,), np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("policy") / "vit", configs()["vit"][0])


@pytest.fixture
def network(folder):
    return NetworkConfig(hidden=(16,), image_features=8, encoder=f"hf:{folder}")


def test_it_sees_what_the_reward_model_sees(folder, network):
    """Per camera and per stacked frame, with the encoder's own colours; grey is three times the same."""
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 64, 64, 6), dtype=np.uint8))
    spec = ObsSpec(state_size=0, images=(("a", (64, 64, 6)), ("b", (64, 64, 1))))
    encoder = ObsEncoder(spec, network).frozen
    model = build_model(section(folder, "resnet_reward"))
    frames = [images[..., :3], images[..., 3:], images[..., :1].expand(-1, -1, -1, 3)]
    with torch.no_grad():
        wanted = torch.cat([model.encode(model.preprocess(each.numpy())) for each in frames], dim=1)
        found = torch.cat([encoder._features(each) for each in (images, images[..., :1])], dim=1)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        out = ObsEncoder(spec, network)({"a": images, "b": images[..., :1]})
    assert out.shape == (4, 8) and float(out.std()) > 0.01


def test_an_update_trains_the_layer_over_it_alone(network):
    sac = SAC(SPEC, ACTIONS, SACConfig(image_shift=2), network, seed=0)
    held = sac.encoder.frozen._shared.encoder
    before = {name: value.clone() for name, value in held.state_dict().items()}
    first = {name: value.clone() for name, value in sac.encoder.state_dict().items()}
    actions = torch.rand(32, 3) * 2 - 1
    sac.update(random_batch(actions, 0, images=True, discount=0.9), prior_rows=0)
    assert all(torch.equal(value, before[name]) for name, value in held.state_dict().items())
    after = sac.encoder.state_dict()
    assert not torch.equal(after["frozen.project.0.weight"], first["frozen.project.0.weight"])
    assert not any("network" in name for name in after)  # a checkpoint has the hash alone
    assert copy.deepcopy(sac.encoder).frozen._shared.encoder is held


def test_a_saved_policy_needs_the_same_weights(network, tmp_path):
    policy = ActorCritic(SPEC, ACTIONS, network)
    state = policy.state_dict()
    again = ActorCritic(SPEC, ACTIONS, network)
    again.load_state_dict(state)
    obs = {"state": torch.zeros(2, 5), "front": torch.full((2, 16, 16, 3), 7, dtype=torch.uint8)}
    assert torch.equal(again.values(obs), policy.values(obs))
    other = NetworkConfig(
        hidden=(16,), image_features=8, encoder=f"hf:{save(tmp_path / 'other', configs()['vit'][0], seed=1)}"
    )
    with pytest.raises(ConfigError, match=r"features of other weights than hf:.*other has now"):
        ActorCritic(SPEC, ACTIONS, other).load_state_dict(state)


def test_a_policy_is_found_again_from_another_folder(folder, tmp_path, monkeypatch):
    """Paths of encoders are whole in a run, its checkpoints and the jobs of other processes."""
    monkeypatch.chdir(folder.parent)
    size = ["env.train.init_params.image_size=[16,16]", "env.eval.init_params.image_size=[16,16]"]
    small = [
        "env.train.num_envs=2",
        "env.eval.num_envs=2",
        "learner.eval_episodes=2",
        "learner.total_steps=8",
    ]
    rgb = [
        "env.train.init_params.obs_mode=rgb",
        "env.eval.init_params.obs_mode=rgb",
        "learner.ppo.num_steps=4",
    ]
    steps = [f"+env.{side}.init_params.max_episode_steps=4" for side in ("train", "eval")]
    given = [
        f"runner.logger.log_path={tmp_path / 'run'}",
        "runner.logger.backends=[]",
        "learner.network.encoder=hf:vit",
    ]
    train(load_config("train", [*size, *small, *rgb, *steps, *given]))
    config = load_config("train_reward", ["reward.model.encoder=hf:vit", "fit.data.path=data"])
    assert _placeable(_job(config, tmp_path)).model.encoder == f"hf:{folder}"
    away = load_config("train_reward", ["reward.model.encoder=hf:owner/name", "fit.data.path=data"])
    assert _placeable(_job(away, tmp_path)).model.encoder == "hf:owner/name"
    monkeypatch.chdir(tmp_path)
    assert load_policy(tmp_path / "run").config.network.encoder == f"hf:{folder}"
    away = folder.rename(folder.parent / "away")
    try:
        with pytest.raises(DataError, match=r"step_8: its policy cannot be made: .*vit"):
            load_policy(tmp_path / "run")
    finally:
        away.rename(folder)


def test_names_and_observations_that_do_not_do_are_said(network):
    with pytest.raises(
        ConfigError, match=r"learner.network.encoder is hf:FOLDER or hf:OWNER/NAME, not 'vit'"
    ):
        NetworkConfig(encoder="vit")
    with pytest.raises(ConfigError, match="looks at images, and the observations have none"):
        ObsEncoder(ObsSpec(state_size=4, images=()), network)


def test_images_that_do_not_do_are_said(network):
    with pytest.raises(ConfigError, match="front has 4 channels"):
        ObsEncoder(ObsSpec(state_size=0, images=(("front", (16, 16, 4)),)), network)
    with pytest.raises(ConfigError, match="8x8"):
        ObsEncoder(ObsSpec(state_size=0, images=(("front", (8, 8, 3)),)), network)
