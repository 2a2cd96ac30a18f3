"""PPO learns what its training rewards ask for, and can be saved at any point."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from guerdon.agents.networks import ObsSpec
from guerdon.agents.policies import ActorCritic, Categorical, Gaussian
from guerdon.agents.ppo import PPO
from guerdon.config import BCConfig, NetworkConfig, PPOConfig
from guerdon.core.batches import Rollout
from guerdon.core.errors import ConfigError, DataError
from guerdon.envs.tabletop.env import TabletopVectorEnv
from guerdon.training.env_worker import RolloutCollector
from tests.agents.cartpoles import CARTPOLE, SAME_STEP, SMALL, cartpoles, learner


def train(env: gym.vector.VectorEnv, cfg: PPOConfig, total: int, relabel: Any = None, seed: int = 0) -> PPO:
    """`relabel` maps a rollout to its training rewards."""
    ppo, collector = learner(env, cfg, seed), RolloutCollector(env, cfg.num_steps)
    collector.reset(seed)
    while collector.env_steps < total:
        rollout = collector.collect(ppo)
        if relabel is not None:
            rollout.update_rewards(relabel(rollout))
        ppo.update(rollout, progress=collector.env_steps / total)
    env.close()
    return ppo


def mean_return(ppo: PPO, env: gym.vector.VectorEnv, steps: int, seed: int = 1000) -> float:
    """Of all episodes that end within a number of steps under the most likely actions."""

    class Greedy:
        def step(self, obs):
            actions = ppo.act(obs, deterministic=True)
            zeros = torch.zeros(len(actions))
            return actions, torch.from_numpy(np.asarray(actions)), zeros, zeros

        values = ppo.values

    collector = RolloutCollector(env, steps)
    collector.reset(seed)
    collector.collect(Greedy())
    env.close()
    return float(np.mean([record.env_return for record in collector.pop_episodes()]))


# Learning


@pytest.mark.slow
def test_cartpole_is_learned_within_60k_steps_and_only_from_the_training_rewards():
    # Of two lengths, as on AVX2 the longer run ends at 268 and the shorter one at 477.
    solved = max(
        mean_return(train(cartpoles(), CARTPOLE, steps), cartpoles(), 1001) for steps in (40_000, 60_000)
    )
    zeroed = train(cartpoles(), CARTPOLE, 20_000, relabel=lambda r: torch.zeros_like(r.env_rewards))
    aimless = mean_return(zeroed, cartpoles(), 1001)
    assert solved >= 400.0
    assert aimless < 200.0


def test_training_rewards_decide_what_is_learned():
    """The next reward alone counts, and it is given for pushing right: then the pole may fall."""
    cfg = PPOConfig(**{**vars(CARTPOLE), "gamma": 0.0})
    ppo = train(cartpoles(), cfg, 10_000, relabel=lambda r: r.actions.float())
    obs = np.random.default_rng(0).uniform(-0.05, 0.05, (200, 4)).astype(np.float32)
    assert ppo.act(obs, deterministic=True).mean() > 0.95


def test_without_a_reward_the_policy_stays_as_it_is():
    """The values begin at zero: the errors of random ones, scaled to advantages, would move the policy."""
    start = {name: part.clone() for name, part in learner(cartpoles(), CARTPOLE).actor.state_dict().items()}
    ppo = train(cartpoles(), CARTPOLE, 4_000, relabel=lambda r: torch.zeros_like(r.env_rewards))
    assert all(torch.equal(part, start[name]) for name, part in ppo.actor.state_dict().items())


@pytest.mark.slow
def test_continuous_actions_improve_on_the_tabletop():
    make = lambda: TabletopVectorEnv(64, autoreset_mode=SAME_STEP, reward="dense")  # noqa: E731
    cfg = PPOConfig(
        num_steps=50, gamma=0.95, minibatch_size=800, lr=1e-3, update_epochs=6, initial_log_std=-0.5
    )
    before = mean_return(learner(make(), cfg), make(), 100)
    after = mean_return(train(make(), cfg, 96_000), make(), 100)
    assert after > before + 5.0


class Lights(gym.Env):
    """One bright half of a small image: name its side. An episode has eight steps."""

    observation_space = gym.spaces.Dict({"camera": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)})
    action_space = gym.spaces.Discrete(2, start=3)

    def _look(self):
        self.side = int(self.np_random.integers(2))
        image = self.np_random.integers(0, 100, (16, 16, 3), np.uint8)
        image[:, 8 * self.side : 8 * self.side + 8] += 100
        return {"camera": image}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 8
        return self._look(), {}

    def step(self, action):
        right = int(action) - 3 == self.side
        self.left -= 1
        return self._look(), float(right), False, self.left == 0, {"success": right}


def lights(num_envs: int = 16) -> SyncVectorEnv:
    return SyncVectorEnv([Lights] * num_envs, autoreset_mode=SAME_STEP)


@pytest.mark.slow
def test_a_policy_learns_from_images():
    cfg = PPOConfig(num_steps=16, gamma=0.0, lr=1e-3, update_epochs=4, minibatch_size=64)
    ppo = train(lights(), cfg, 5_000)
    assert mean_return(ppo, lights(), 32) > 7.5  # of 8; guessing gives 4


@pytest.mark.slow
def test_normalised_observations_make_odd_scales_learnable():
    class Scaled(gym.vector.VectorWrapper):
        def reset(self, **kwargs):
            obs, info = self.env.reset(**kwargs)
            return obs * 1e-3 + 1.0, info

        def step(self, actions):
            obs, *rest, info = self.env.step(actions)
            if "final_obs" in info:
                final = np.array(info["final_obs"])
                for env in np.flatnonzero(info["_final_obs"]):
                    final[env] = final[env] * 1e-3 + 1.0
                info = {**info, "final_obs": final}
            return obs * 1e-3 + 1.0, *rest, info

    raw = train(Scaled(cartpoles()), CARTPOLE, 20_000)
    scaled = train(Scaled(cartpoles()), PPOConfig(**{**vars(CARTPOLE), "normalize_obs": True}), 20_000)
    assert mean_return(scaled, Scaled(cartpoles()), 601) > 2.0 * mean_return(raw, Scaled(cartpoles()), 601)


# The pieces of an update


@pytest.mark.parametrize("space", [gym.spaces.Discrete(5), gym.spaces.Box(-1.0, 1.0, (3,))])
def test_log_probs_and_gradients_are_those_of_torch(space: gym.Space):
    draw = torch.Generator().manual_seed(0)
    weights, discrete = torch.randn(50, generator=draw), isinstance(space, gym.spaces.Discrete)
    if discrete:
        family: Any = Categorical(space)
        heads: Any = (torch.randn(50, 5, generator=draw).requires_grad_(),)
        known = torch.distributions.Categorical(logits=heads[0])
    else:
        family = Gaussian(space)
        heads = tuple(torch.randn(*shape, generator=draw).requires_grad_() for shape in ((50, 3), (3,)))
        known = torch.distributions.Independent(torch.distributions.Normal(heads[0], heads[1].exp()), 1)
    actions, drawn_log_probs = family.sample(heads, draw)
    actions = actions.detach()
    log_probs, entropy = family.evaluate(heads, actions)
    torch.testing.assert_close(log_probs, known.log_prob(actions), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(drawn_log_probs, log_probs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(entropy, known.entropy().mean(), atol=1e-5, rtol=1e-5)
    loss = (weights * known.log_prob(actions)).sum() + 0.3 * known.entropy().mean()
    found = torch.autograd.grad((weights * log_probs).sum() + 0.3 * entropy, heads)
    for mine, theirs in zip(found, torch.autograd.grad(loss, heads), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_categorical_draws_follow_the_probabilities():
    logits = torch.tensor([0.1, 0.2, 0.7]).log().expand(60_000, 3)
    actions, _ = Categorical(gym.spaces.Discrete(3)).sample((logits,), torch.Generator().manual_seed(0))
    shares = torch.bincount(actions, minlength=3) / 60_000
    assert (shares - torch.tensor([0.1, 0.2, 0.7])).abs().max() < 0.01


@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_an_update_is_the_textbook_step(kind: str, entropy_coef: float):
    """Loss, clipping and Adam in one vector against the loss as the paper has it and torch's own Adam."""
    env = cartpoles(4) if kind == "discrete" else TabletopVectorEnv(4, autoreset_mode=SAME_STEP)
    cfg = PPOConfig(
        num_steps=30,
        minibatch_size=1000,
        update_epochs=5,
        lr=3e-3,
        entropy_coef=entropy_coef,
        clip_range=0.05,
    )
    ppo, collector = learner(env, cfg), RolloutCollector(env, 30)
    collector.reset(0)
    rollout = collector.collect(ppo)
    twin = ActorCritic(ObsSpec.of(env.single_observation_space), env.single_action_space, SMALL)
    twin.load_state_dict(ppo.actor.state_dict())
    adam = torch.optim.Adam(twin.parameters(), lr=cfg.lr, eps=1e-5)
    advantages, returns = (part.flatten() for part in ppo.advantages(rollout))
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    obs, actions = {"state": rollout.obs["state"].flatten(0, 1)}, rollout.actions.flatten(0, 1)
    clipped_at_all = 0.0
    for _ in range(cfg.update_epochs):
        heads, values = twin(obs)
        log_probs, entropy = twin.distribution.evaluate(heads, actions)
        ratio = torch.exp(log_probs - rollout.log_probs.flatten())
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.95, 1.05) * advantages).mean()
        loss = -gain + cfg.value_coef * (values - returns).square().mean() - entropy_coef * entropy
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), cfg.max_grad_norm)
        adam.step()
        clipped_at_all += float(((ratio - 1.0).abs() > 0.05).float().mean())
    stats = ppo.update(rollout)
    assert clipped_at_all > 0.0
    assert stats["clip_fraction"] == pytest.approx(clipped_at_all / cfg.update_epochs, abs=0.01)
    for mine, theirs in zip(ppo.actor.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-3)
    env.close()


def test_target_kl_stops_early():
    env = cartpoles()
    moved = []
    for target_kl in (None, 1e-3):
        ppo, collector = (
            learner(env, PPOConfig(num_steps=32, lr=1e-2, update_epochs=20, target_kl=target_kl)),
            RolloutCollector(env, 32),
        )
        collector.reset(0)
        rollout = collector.collect(ppo)
        start = torch.cat([part.flatten() for part in ppo.actor.parameters()]).detach().clone()
        ppo.update(rollout)
        moved.append(
            float((torch.cat([p.flatten() for p in ppo.actor.parameters()]) - start).detach().norm())
        )
    env.close()
    assert moved[1] < 0.3 * moved[0]


def test_a_rollout_of_another_policy_is_beyond_target_kl():
    env = cartpoles()
    cfg = PPOConfig(num_steps=32, target_kl=1e-3)
    ppo, collector = learner(env, cfg), RolloutCollector(env, 32)
    collector.reset(0)
    rollout = collector.collect(ppo)
    rollout.log_probs -= 1.0
    with pytest.raises(DataError, match="not of this policy"):
        ppo.update(rollout)
    env.close()


# Saving


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_save_load_and_go_on_gives_the_same_numbers(kind: str, tmp_path):
    def make():
        return cartpoles() if kind == "discrete" else TabletopVectorEnv(8, autoreset_mode=SAME_STEP)

    cfg = PPOConfig(num_steps=32, normalize_obs=True, update_epochs=2, minibatch_size=64)

    def run(ppo: PPO, seed: int, updates: int) -> list[dict[str, float]]:
        env = make()
        collector = RolloutCollector(env, 32)
        collector.reset(seed)
        stats = [ppo.update(collector.collect(ppo)) for _ in range(updates)]
        env.close()
        return stats

    first = learner(make(), cfg, seed=3)
    run(first, 0, 3)
    torch.save(first.state_dict(), tmp_path / "ppo.pt")
    expected = run(first, 1, 3)
    second = learner(make(), cfg, seed=99)
    torch.manual_seed(5)  # the global generator has no say
    second.load_state_dict(torch.load(tmp_path / "ppo.pt", weights_only=True))
    assert run(second, 1, 3) == expected
    for name, part in first.state_dict()["actor"].items():
        assert torch.equal(part, second.state_dict()["actor"][name]), name


def test_seeds_decide_everything_and_leave_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, two, other = (train(cartpoles(), CARTPOLE, 1_000, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    for name, part in one["actor"].items():
        assert torch.equal(part, two["actor"][name]), name
    assert not torch.equal(one["actor"]["policy.0.weight"], other["actor"]["policy.0.weight"])


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_copies_that_divide_the_environments_act_as_one(kind: str):
    env = cartpoles(7) if kind == "discrete" else TabletopVectorEnv(7, autoreset_mode=SAME_STEP)
    whole, copies = learner(env, CARTPOLE), [learner(env, CARTPOLE, seed=seed) for seed in (5, 6)]
    obs, _ = env.reset(seed=0)
    for copy in copies:
        copy.load_policy(whole.policy_state())
    for _ in range(3):
        expected = whole.step(obs)
        parts = [
            copy.step(obs[start:stop], (start, stop, 7))
            for copy, (start, stop) in zip(copies, [(0, 3), (3, 7)], strict=True)
        ]
        for answer, *both in zip(expected, *parts, strict=True):
            joined = np.concatenate([np.asarray(item) for item in both])
            np.testing.assert_allclose(joined, np.asarray(answer), rtol=1e-5, atol=1e-6)
    for copy in copies:
        np.testing.assert_array_equal(copy.generator_state(), whole.generator_state())
    env.close()


def test_a_state_of_other_networks_is_refused():
    env = cartpoles(1)
    state = learner(env, CARTPOLE, hidden=(32, 32)).state_dict()
    with pytest.raises(DataError, match="does not fit this learner"):
        learner(env, CARTPOLE).load_state_dict(state)
    env.close()


# Settings


@pytest.mark.parametrize("anneal", [True, False])
def test_the_learning_rate_falls_with_the_progress_of_the_run(anneal):
    env = cartpoles(2)
    cfg = PPOConfig(num_steps=8, lr=1e-3, anneal_lr=anneal)
    ppo, collector = learner(env, cfg), RolloutCollector(env, 8)
    collector.reset(0)
    for progress, share in ((0.0, 1.0), (0.25, 0.75), (1.0, 0.0), (1.5, 0.0)):
        before = [part.detach().clone() for part in ppo.actor.parameters()]
        reported = ppo.update(collector.collect(ppo), progress)
        assert reported["lr"] == pytest.approx(1e-3 * (share if anneal else 1.0))
        same = all(torch.equal(*pair) for pair in zip(ppo.actor.parameters(), before, strict=True))
        assert same == (anneal and share == 0.0)
    env.close()


def test_returns_that_do_not_vary_leave_no_number_that_is_none():
    env = cartpoles(2)
    ppo, collector = learner(env, PPOConfig(num_steps=8, gamma=0.0)), RolloutCollector(env, 8)
    collector.reset(0)
    rollout = collector.collect(ppo)
    reported = ppo.update(rollout)
    assert "explained_variance" not in reported  # a reward of 1 at every step, and no future
    rollout.update_rewards(torch.arange(16.0).reshape(8, 2))
    reported |= ppo.update(rollout)
    assert reported["explained_variance"] < 0.5 and np.isfinite(list(reported.values())).all()
    env.close()


def test_unknown_action_spaces_are_refused():
    for space in (gym.spaces.MultiBinary(3), gym.spaces.Box(-1.0, 1.0, (2, 2))):
        with pytest.raises(ConfigError, match="actions"):
            PPO(ObsSpec(state_size=4), space, CARTPOLE, SMALL, seed=0)


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_the_reference_holds_the_policy_back(kind):
    space = gym.spaces.Box(-1, 1, (2,), np.float32) if kind == "continuous" else gym.spaces.Discrete(3)
    spec, network = ObsSpec(state_size=3), NetworkConfig(hidden=(16,))
    moved = {}
    for coef in (0.0, 3.0):
        cfg = PPOConfig(reference_coef=coef, lr=3e-3, minibatch_size=64, update_epochs=8)
        ppo = PPO(spec, space, cfg, network, seed=0)
        ppo.keep_reference()
        assert (ppo.reference is None) == (coef == 0.0)
        obs = torch.randn(16, 8, 3, generator=torch.Generator().manual_seed(1))
        flat = {"state": obs.flatten(0, 1)}
        before = ppo.actor.heads(ppo.actor.prepare(flat))[0].detach().clone()
        for _ in range(5):
            steps = [ppo.step({"state": row}) for row in obs]
            actions, log_probs, values = (
                torch.stack(parts).clone() for parts in list(zip(*steps, strict=True))[1:]
            )
            wanted = actions.float().reshape(16, 8, -1)[..., 0]  # the larger, the better
            flags = torch.zeros(16, 8, dtype=torch.bool)
            ppo.update(
                Rollout(
                    obs={"state": obs},
                    actions=actions,
                    log_probs=log_probs,
                    values=values,
                    env_rewards=wanted,
                    training_rewards=wanted,
                    terminated=~flags,
                    truncated=flags,
                    final_values=torch.zeros(16, 8),
                    last_values=torch.zeros(8),
                    success=flags,
                    elapsed=torch.zeros(16, 8, dtype=torch.int64),
                )
            )
        after = ppo.actor.heads(ppo.actor.prepare(flat))[0].detach()
        moved[coef] = float((after - before).square().mean())
        again = PPO(spec, space, cfg, network, seed=1)
        again.load_state_dict(ppo.state_dict())
        assert (again.reference is None) == (coef == 0.0)
    assert 0 < moved[3.0] < 0.5 * moved[0.0]


def test_a_cloned_policy_keeps_the_statistics_of_its_demonstrations():
    """With those of other states it would act otherwise before it has learned anything."""
    env = cartpoles(4)
    cfg = PPOConfig(num_steps=16, minibatch_size=32, normalize_obs=True, lr=1e-12)  # nothing is learned
    shown = {"state": 0.1 * torch.randn(64, 4)}, torch.randint(2, (64,))
    moved = {}
    for cloned in (True, False):
        ppo, collector = learner(env, cfg), RolloutCollector(env, cfg.num_steps)
        if cloned:
            ppo.clone(shown, BCConfig(epochs=2), 0)
        collector.reset(0)
        before = ppo.log_probs(shown[0], shown[1])
        ppo.update(collector.collect(ppo))
        moved[cloned] = float((ppo.log_probs(shown[0], shown[1]) - before).abs().max())
        again = learner(env, cfg)
        again.load_state_dict(ppo.state_dict())
        assert again.state_dict()["cloned"] == cloned
    assert moved[True] < 1e-6 < 1e-4 < moved[False]
    env.close()
