"""Cloned policies do what was shown, and demonstrations pair each action with what it was chosen in."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from guerdon.agents.cloning import clone, demonstrations
from guerdon.agents.networks import ObsSpec
from guerdon.agents.policies import ActorCritic
from guerdon.agents.ppo import PPO
from guerdon.config import BCConfig, NetworkConfig, PPOConfig
from guerdon.config.schema import CollectConfig, EnvConfig
from guerdon.core.errors import DataError
from guerdon.core.types import Episode
from guerdon.data.collect.run import collect
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.data.summary import convert
from guerdon.envs.tabletop.env import TabletopVectorEnv

STATES = ObsSpec.of(TabletopVectorEnv(1).single_observation_space)
ACTIONS = TabletopVectorEnv(1).single_action_space


@pytest.fixture(scope="module")
def expert_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("expert") / "data"
    collect(
        EnvConfig(id="guerdon/Tabletop-v0", num_envs=32, init_params={"image_size": [16, 16]}),
        CollectConfig(
            save_dir=str(folder),
            format="native",
            policy="scripted",
            policy_noise=0.1,
            target_success=192,
            target_failure=0,
        ),
        seed=0,
    )
    return folder


def success_rate(ppo: PPO, num_envs: int = 64, **settings: Any) -> float:
    """Share of episodes that succeed at any step, under the most likely actions."""
    env = TabletopVectorEnv(num_envs, autoreset_mode=AutoresetMode.DISABLED, **settings)
    obs, _ = env.reset(seed=12_345)
    succeeded = np.zeros(num_envs, np.bool_)
    for _ in range(50):
        obs, _, _, _, info = env.step(ppo.act(obs, deterministic=True))
        succeeded |= info["success"]
    return float(succeeded.mean())


@pytest.mark.slow
@pytest.mark.parametrize("normalize_obs", [False, True])
def test_a_cloned_state_policy_succeeds(expert_data: Path, normalize_obs: bool):
    network = NetworkConfig(hidden=(128, 128), activation="relu")
    ppo = PPO(STATES, ACTIONS, PPOConfig(normalize_obs=normalize_obs), network, seed=0)
    untrained, log_std = success_rate(ppo), ppo.actor.log_std.detach().clone()
    result = clone(ppo.actor, demonstrations(expert_data, STATES), BCConfig(epochs=40), seed=0)
    assert result["loss_last"] < 0.5 * result["loss_first"]
    assert untrained < 0.1
    assert success_rate(ppo) > untrained + 0.7
    assert torch.equal(ppo.actor.log_std, log_std)  # exploration is left as it was


def test_learning_goes_on_after_cloning(expert_data: Path):
    """The optimiser of the learner moves the same weights that cloning moved."""
    ppo = PPO(STATES, ACTIONS, PPOConfig(), NetworkConfig(hidden=(64,)), seed=0)
    clone(ppo.actor, demonstrations(expert_data, STATES), BCConfig(epochs=2), seed=0)
    cloned = ppo.act(np.zeros((1, STATES.state_size), np.float32), deterministic=True)
    twin = PPO(STATES, ACTIONS, PPOConfig(), NetworkConfig(hidden=(64,)), seed=1)
    twin.load_state_dict(ppo.state_dict())
    assert np.array_equal(twin.act(np.zeros((1, STATES.state_size), np.float32), deterministic=True), cloned)
    from guerdon.training.env_worker import RolloutCollector

    collector = RolloutCollector(TabletopVectorEnv(8, autoreset_mode=AutoresetMode.SAME_STEP), 16)
    collector.reset(0)
    before = [part.detach().clone() for part in ppo.actor.parameters()]
    ppo.update(collector.collect(ppo))
    moved = [
        float((now - then).detach().abs().max())
        for now, then in zip(ppo.actor.parameters(), before, strict=True)
    ]
    assert min(moved) > 0.0 and max(moved) < 0.05


def test_cloning_is_decided_by_its_seed(expert_data: Path):
    data = demonstrations(expert_data, STATES)
    weights = []
    for seed in (0, 0, 1):
        ppo = PPO(STATES, ACTIONS, PPOConfig(), NetworkConfig(hidden=(32,)), seed=0)
        clone(ppo.actor, data, BCConfig(epochs=2), seed=seed)
        weights.append(ppo.state_dict()["actor"]["policy.0.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_discrete_actions_are_cloned():
    draw = torch.Generator().manual_seed(0)
    state = torch.randn(600, 3, generator=draw)
    actions = state.argmax(-1, keepdim=True).float() + 5.0
    ppo = PPO(
        ObsSpec(state_size=3),
        gym.spaces.Discrete(3, start=5),
        PPOConfig(),
        NetworkConfig(hidden=(32,)),
        seed=0,
    )
    clone(ppo.actor, ({"state": state}, actions), BCConfig(epochs=60, batch_size=64), seed=0)
    fresh = torch.randn(500, 3, generator=draw)
    agreement = (ppo.act({"state": fresh}, deterministic=True) - 5 == fresh.argmax(-1).numpy()).mean()
    assert agreement > 0.9


def test_an_image_policy_is_cloned_from_frames(tmp_path: Path):
    """The frame says what to do: its brightness is the action that follows."""
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path / "data") as writer:
        for _ in range(12):
            level = rng.uniform(0.0, 1.0, 10)
            frames = np.repeat((level * 255).astype(np.uint8), 16 * 16 * 3).reshape(10, 16, 16, 3)
            actions = np.append(0.0, level[:-1])[:, None].astype(np.float32)
            writer.add(
                Episode(
                    frames={"camera": frames}, labels=np.ones(10, np.float32), success=True, actions=actions
                )
            )
    spec = ObsSpec(state_size=0, images=(("camera", (16, 16, 3)),))
    obs, actions = demonstrations(tmp_path / "data", spec)
    assert obs.keys() == {"camera"} and obs["camera"].dtype == torch.uint8
    assert len(actions) == len(obs["camera"]) == 12 * 9  # action 0 has no frame
    assert (obs["camera"][:, 0, 0, 0] / 255.0 - actions[:, 0]).abs().max() < 0.01
    actor = ActorCritic(spec, gym.spaces.Box(-1.0, 1.0, (1,)), NetworkConfig(hidden=(32,), image_features=16))
    result = clone(actor, (obs, actions), BCConfig(epochs=60, batch_size=32), seed=0)
    assert result["loss_last"] < 0.01 < result["loss_first"]
    assert result["num_transitions"] == 108 and result["num_updates"] == 60 * 4


def episode(steps: int, **changes: Any) -> Episode:
    """Step t leads to the state [t + 1, ...] by the action [t]; the initial state is [0, ...]."""
    fields = {
        "frames": {"camera": np.zeros((steps, 16, 16, 3), np.uint8)},
        "labels": np.ones(steps, np.float32),
        "success": True,
        "actions": np.arange(steps, dtype=np.float32)[:, None],
        "states": np.repeat(np.arange(1, steps + 1, dtype=np.float32)[:, None], 4, axis=1),
        "initial_state": np.zeros(4, np.float32),
    }
    return Episode(**{**fields, **changes})


def write(path: Path, *episodes: Episode) -> Path:
    with StoreWriter(path) as writer:
        for item in episodes:
            writer.add(item)
    return path


def test_each_action_stands_beside_the_state_it_was_chosen_in(tmp_path: Path):
    failed = episode(6, labels=np.zeros(6, np.float32), success=False)
    path = write(tmp_path / "data", episode(5), failed, episode(4, complete=False), episode(3))
    assert EpisodeStore(path).num_episodes == 4
    obs, actions = demonstrations(path, ObsSpec(state_size=4))
    assert actions[:, 0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert torch.equal(obs["state"][:, 0], actions[:, 0])
    first = demonstrations(path, ObsSpec(state_size=4), num_episodes=1)
    assert first[1][:, 0].tolist() == [0, 1, 2, 3, 4] and len(first[0]["state"]) == 5
    both = ObsSpec(state_size=4, images=(("camera", (16, 16, 3)),))
    obs, actions = demonstrations(path, both)
    assert actions[:, 0].tolist() == [1, 2, 3, 4, 1, 2]
    assert torch.equal(obs["state"][:, 0], actions[:, 0])


def test_what_was_meant_is_cloned_instead_if_asked_for(tmp_path: Path):
    meant = 100.0 + np.arange(5, dtype=np.float32)[:, None]
    path = write(tmp_path / "data", episode(5, intended=meant), episode(5, intended=meant))
    obs, actions = demonstrations(path, ObsSpec(state_size=4), intended=True)
    assert actions[:, 0].tolist() == [100, 101, 102, 103, 104] * 2
    assert torch.equal(obs["state"][:, 0] + 100.0, actions[:, 0])
    assert demonstrations(path, ObsSpec(state_size=4))[1][:, 0].tolist() == [0, 1, 2, 3, 4] * 2
    both = ObsSpec(state_size=4, images=(("camera", (16, 16, 3)),))
    assert demonstrations(path, both, intended=True)[1][:, 0].tolist() == [101, 102, 103, 104] * 2
    write(path, episode(3))  # does not tell
    with pytest.raises(DataError, match=r"what the demonstrator meant.*learner\.warm_start\.intended"):
        demonstrations(path, ObsSpec(state_size=4), intended=True)


def test_without_an_initial_state_the_first_action_is_left_out(tmp_path: Path):
    path = write(tmp_path / "data", episode(5, initial_state=None))
    obs, actions = demonstrations(path, ObsSpec(state_size=4))
    assert actions[:, 0].tolist() == obs["state"][:, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("format", ["pkl-episode", "realworld-pkl"])
def test_foreign_formats_are_cloned_like_native_ones(tmp_path: Path, format: str):
    native = write(tmp_path / "native", episode(5), episode(3))
    convert(native, tmp_path / "foreign", format)
    for spec in (ObsSpec(state_size=4), ObsSpec(state_size=4, images=(("camera", (16, 16, 3)),))):
        obs, actions = demonstrations(native, spec)
        other, done = demonstrations(tmp_path / "foreign", spec)
        assert torch.equal(actions, done) and obs.keys() == other.keys()
        assert all(torch.equal(part, other[name]) for name, part in obs.items())


@pytest.mark.parametrize(
    ("changes", "spec", "complaint"),
    [
        ({"success": False, "labels": np.zeros(5, np.float32)}, ObsSpec(state_size=4), "no successful"),
        ({"actions": None}, ObsSpec(state_size=4), "no actions"),
        ({"states": None, "initial_state": None}, ObsSpec(state_size=4), "no states"),
        ({}, ObsSpec(state_size=7), "states of size 4, not 7"),
        ({"initial_state": np.zeros(3, np.float32)}, ObsSpec(state_size=4), "states of size 3, not 4"),
        ({}, ObsSpec(state_size=4, images=(("wrist", (16, 16, 3)),)), "observes wrist"),
    ],
)
def test_data_that_do_not_fit_are_refused(tmp_path: Path, changes: dict, spec: ObsSpec, complaint: str):
    with pytest.raises(DataError, match=complaint):
        demonstrations(write(tmp_path / "data", episode(5, **changes)), spec)


def test_mismatched_lengths_are_refused():
    actor = ActorCritic(ObsSpec(state_size=4), ACTIONS, NetworkConfig(hidden=(8,)))
    with pytest.raises(DataError, match="cannot clone"):
        clone(actor, ({"state": torch.zeros(5, 4)}, torch.zeros(4, 4)), BCConfig(), seed=0)


class Slope(torch.nn.Module):
    """Its loss falls at the same rate everywhere: every step of Adam is as long as the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def observe(self, obs: Any) -> None:
        pass

    def prepare(self, obs: Any) -> Any:
        return obs

    def imitation_loss(self, prepared: Any, actions: torch.Tensor) -> torch.Tensor:
        return self.weight


@pytest.mark.parametrize(("anneal_lr", "way"), [(False, 10 * 0.1), (True, 0.1 * sum(range(1, 11)) / 10)])
def test_the_learning_rate_falls_if_asked_to(anneal_lr: bool, way: float):
    actor, cfg = Slope(), BCConfig(epochs=5, batch_size=4, lr=0.1, anneal_lr=anneal_lr)
    outcome = clone(actor, ({"state": torch.zeros(8, 1)}, torch.zeros(8, 1)), cfg, seed=0)
    assert outcome["num_updates"] == 10
    assert actor.weight.item() == pytest.approx(-way, rel=1e-4)
