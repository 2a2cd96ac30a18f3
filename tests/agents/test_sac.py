"""SAC: gradients and targets against plain formulas, and that it learns."""

import copy
import math
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from benchmarks.bench_offpolicy import Task, make, make_learner, make_replay, mean_return, train
from guerdon.agents.flat import BatchedMLP, FlatAdam
from guerdon.agents.networks import ObsSpec, shift_images
from guerdon.agents.policies import draw
from guerdon.agents.sac import SAC
from guerdon.config import NetworkConfig, SACConfig
from guerdon.core.batches import TrainBatch
from guerdon.core.errors import ConfigError, DataError
from guerdon.envs.observations import with_final
from tests.agents.batches import random_batch

SPEC = ObsSpec(state_size=5)
SPACE = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
SMALL = NetworkConfig(hidden=(16, 16), activation="relu")


def make_batch(count: int = 32, seed: int = 0, images: bool = False) -> TrainBatch:
    low, high = torch.from_numpy(SPACE.low), torch.from_numpy(SPACE.high)
    actions = low + (high - low) * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))
    return random_batch(actions, seed, images=images, discount=0.9)


def update_actor(sac: SAC, features: torch.Tensor, goal: torch.Tensor | None = None) -> dict[str, float]:
    """The policy's part of an update."""
    return sac._update_actor(features, draw(sac.actor(features)[0], sac._noise), goal)


def plain_forward(net: BatchedMLP, flat: torch.Tensor, inputs: torch.Tensor, cfg: NetworkConfig):
    """The same network, one member after the other."""
    *hidden, (weight, bias) = net._views(flat)
    outputs = []
    for member in range(len(weight)):
        values = inputs
        for w, b, *norm in hidden:
            values = values @ w[member] + b[member]
            if norm:
                width = values.shape[-1:]
                values = torch.nn.functional.layer_norm(values, width, norm[0][member, 0], norm[1][member, 0])
            values = values.relu() if cfg.activation == "relu" else values.tanh()
        outputs.append(values @ weight[member] + bias[member])
    return torch.stack(outputs)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("size_out", [1, 3])
def test_networks_in_one_vector_agree_with_one_after_the_other(layer_norm, activation, size_out):
    cfg = NetworkConfig(hidden=(8, 6), activation=activation, layer_norm=layer_norm)
    torch.manual_seed(0)
    net = BatchedMLP(3, 4, size_out, cfg)
    net.flat.add_(0.1 * torch.randn(net.flat.shape))
    inputs, weights = torch.randn(7, 4, requires_grad=True), torch.randn(3, 7, size_out)
    flat = net.flat.clone().requires_grad_(True)
    expected = plain_forward(net, flat, inputs, cfg)
    (expected * weights).sum().backward()
    seen = inputs.detach().clone().requires_grad_(True)
    outputs = net(seen)
    (outputs * weights).sum().backward()
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.gradient, flat.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen.grad, inputs.grad, rtol=1e-4, atol=1e-5)
    net.gradient.fill_(7.0)
    again = inputs.detach().clone().requires_grad_(True)
    (net(again, frozen=True) * weights).sum().backward()
    torch.testing.assert_close(again.grad, inputs.grad, rtol=1e-4, atol=1e-5)
    assert (net.gradient == 7.0).all()


def test_adam_is_the_one_of_torch():
    torch.manual_seed(0)
    flat, gradient = torch.randn(50), torch.empty(50)
    parameter = torch.nn.Parameter(flat.clone())
    mine, theirs = FlatAdam(flat, 1e-2), torch.optim.Adam([parameter], lr=1e-2)
    for _ in range(20):
        gradient.copy_(torch.randn(50))
        parameter.grad = gradient.clone()
        mine.step(gradient)
        theirs.step()
    torch.testing.assert_close(flat, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_moments_do_not_become_denormal():
    flat, gradient = torch.zeros(50), torch.ones(50)
    adam = FlatAdam(flat, 1e-2)
    adam.step(gradient)
    gradient.zero_()
    smallest = torch.finfo(torch.float32).tiny
    for _ in range(1_500):
        adam.step(gradient)
        mean = adam.state_dict()["mean"]
        assert ((mean == 0.0) | (mean >= smallest)).all()
    assert (mean == 0.0).all()


@pytest.mark.parametrize("num_min_critics", [2, 1])
@pytest.mark.parametrize("bc_coef", [0.0, 3.0])
def test_the_gradient_of_the_policy_is_that_of_its_loss(num_min_critics, bc_coef):
    cfg = SACConfig(num_min_critics=num_min_critics, bc_coef=bc_coef, initial_alpha=0.3)
    sac, batch = SAC(SPEC, SPACE, cfg, SMALL, seed=0), make_batch()
    sac.actor.flat.add_(0.3 * torch.randn(sac.actor.flat.shape, generator=torch.Generator().manual_seed(1)))
    unit = (batch.actions - sac._middle) / sac._half
    noise_state = sac._noise.get_state()
    flat, state = sac.actor.flat.clone().requires_grad_(True), batch.obs["state"]
    metrics = update_actor(sac, state, unit[:10] if bc_coef else None)

    noise = torch.randn((32, 2), generator=torch.Generator().set_state(noise_state))
    mean, log_std = plain_forward(sac.actor, flat, state, SMALL)[0].chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.exp())
    policy = torch.distributions.TransformedDistribution(
        normal, [torch.distributions.TanhTransform(cache_size=1)]
    )
    actions = torch.tanh(mean + noise * log_std.exp())
    log_density = policy.log_prob(actions).sum(-1)
    values = plain_forward(sac.critics, sac.critics.flat, torch.cat([state, actions], 1), SMALL)[..., 0]
    value = values.amin(0) if num_min_critics == 2 else values.mean(0)
    loss = (0.3 * log_density - value).mean()
    assert metrics["actor_loss"] == pytest.approx(loss.item(), abs=1e-4)
    loss = loss + bc_coef * (torch.tanh(mean[:10]) - unit[:10]).square().mean()
    loss.backward()
    torch.testing.assert_close(sac.actor.gradient, flat.grad, rtol=1e-3, atol=1e-5)
    assert metrics["entropy"] == pytest.approx(-log_density.mean().item(), abs=1e-4)


def test_an_update_teaches_the_policy_with_new_critics_and_its_own_rows():
    sac, batch = SAC(SPEC, SPACE, SACConfig(initial_alpha=0.3), SMALL, seed=0), make_batch()
    noise_state, flat = sac._noise.get_state(), sac.actor.flat.clone().requires_grad_(True)
    sac.update(batch)
    noise = torch.randn((64, 2), generator=torch.Generator().set_state(noise_state))[:32]
    mean, log_std = plain_forward(sac.actor, flat, batch.obs["state"], SMALL)[0].chunk(2, -1)
    before = mean + noise * log_std.exp()
    squeezed = 2.0 * (math.log(2.0) - before - torch.nn.functional.softplus(-2.0 * before))
    log_density = torch.distributions.Normal(mean, log_std.exp()).log_prob(before) - squeezed
    inputs = torch.cat([batch.obs["state"], torch.tanh(before)], 1)
    values = plain_forward(sac.critics, sac.critics.flat, inputs, SMALL)[..., 0]
    (0.3 * log_density.sum(-1) - values.amin(0)).mean().backward()
    torch.testing.assert_close(sac.actor.gradient, flat.grad, rtol=1e-3, atol=1e-5)


def test_the_gradient_of_the_critics_is_that_of_their_loss():
    sac, batch = SAC(SPEC, SPACE, SACConfig(num_critics=3), SMALL, seed=0), make_batch()
    flat = sac.critics.flat.clone().requires_grad_(True)
    unit, goal = (batch.actions - sac._middle) / sac._half, torch.randn(32)
    metrics = sac._update_critics(batch.obs["state"], unit, goal)
    values = plain_forward(sac.critics, flat, torch.cat([batch.obs["state"], unit], 1), SMALL)[..., 0]
    loss = 0.5 * (values - goal).square().mean(1).sum()
    loss.backward()
    torch.testing.assert_close(sac.critics.gradient, flat.grad, rtol=1e-4, atol=1e-5)
    assert metrics["critic_loss"] == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("entropy_in_backup", [True, False])
def test_targets_follow_the_formula(entropy_in_backup):
    cfg = SACConfig(entropy_in_backup=entropy_in_backup, initial_alpha=0.5)
    sac, batch = SAC(SPEC, SPACE, cfg, SMALL, seed=0), make_batch()
    start = sac._noise.get_state()
    targets = sac.targets(batch)
    sac._noise.set_state(start)
    drawn = draw(sac.actor(batch.next_obs["state"])[0], sac._noise)
    values = sac.target_critics(torch.cat([batch.next_obs["state"], drawn.actions], 1))[..., 0]
    future = values.amin(0) - (0.5 * drawn.log_density if entropy_in_backup else 0.0)
    expected = batch.training_rewards + batch.not_terminated * batch.discount * future
    torch.testing.assert_close(targets, expected)
    ended = batch.not_terminated == 0
    assert ended.any() and torch.equal(targets[ended], batch.training_rewards[ended])


def test_a_deviation_at_its_limit_is_not_pushed_further():
    sac, batch = SAC(SPEC, SPACE, SACConfig(), SMALL, seed=0), make_batch()
    sac.actor._layers[-1][1][0, 0, 2:] = torch.tensor([5.0, 0.0])  # log deviations of the two actions
    update_actor(sac, batch.obs["state"])
    slopes = sac.actor._views(sac.actor.gradient)[-1][1][0, 0]
    assert slopes[2] == 0.0 and (slopes[[0, 1, 3]] != 0.0).all()


def test_target_critics_follow_slowly():
    sac = SAC(SPEC, SPACE, SACConfig(tau=0.1), SMALL, seed=0)
    for seed in range(3):
        before = sac.target_critics.flat.clone()
        sac.update(make_batch(seed=seed))
        torch.testing.assert_close(sac.target_critics.flat, 0.9 * before + 0.1 * sac.critics.flat)


def test_the_policy_waits_for_its_turn_and_the_critics_do_not():
    sac = SAC(SPEC, SPACE, SACConfig(actor_every=3), SMALL, seed=0)
    for step in range(7):
        actor, critics = sac.actor.flat.clone(), sac.critics.flat.clone()
        metrics = sac.update(make_batch(seed=step))
        assert torch.equal(sac.actor.flat, actor) == (step % 3 != 0) == ("actor_loss" not in metrics)
        assert not torch.equal(sac.critics.flat, critics)


@pytest.mark.parametrize(("target", "sign"), [(50.0, 1), (-50.0, -1), (None, -1)])
def test_the_temperature_rises_while_there_is_too_little_entropy(target, sign):
    cfg = SACConfig(target_entropy=target, alpha_lr=0.01)
    sac, fixed = (SAC(SPEC, SPACE, each, SMALL, seed=0) for each in (cfg, replace(cfg, learn_alpha=False)))
    for learner in (sac, fixed):
        for step in range(5):
            entropy = learner.update(make_batch(seed=step))["entropy"]
    assert (entropy < (-2.0 if target is None else target)) == (sign > 0)  # two actions: -2 by default
    start = math.log(cfg.initial_alpha)
    assert sac.log_alpha.item() == pytest.approx(start + sign * 0.05, abs=0.01)
    assert fixed.log_alpha.item() == pytest.approx(start)
    assert sac._target_entropy == (-2.0 if target is None else target)


def test_what_is_seen_now_and_next_is_shifted_and_the_policy_has_no_layer_norm(monkeypatch):
    spec = ObsSpec(state_size=5, images=(("front", (16, 16, 3)),))
    network = NetworkConfig(hidden=(16,), layer_norm=True, image_features=8)
    sac, batch = SAC(spec, SPACE, SACConfig(image_shift=2), network, seed=0), make_batch(images=True)
    seen, real = [], sac.encoder.forward
    monkeypatch.setattr(sac.encoder, "forward", lambda obs: seen.append(obs) or real(obs))
    sac.update(batch)
    for shown, given in zip(seen, (batch.next_obs, batch.obs), strict=True):
        moved = (shown["front"] != given["front"]).flatten(1).any(1)
        assert moved.float().mean() > 0.8 and torch.equal(shown["state"], given["state"])
    assert sac.critics._normed and not sac.actor._normed


def test_the_minimum_is_over_a_subset_that_changes():
    sac = SAC(
        SPEC, SPACE, SACConfig(num_critics=6, num_min_critics=1, entropy_in_backup=False), SMALL, seed=0
    )
    sac.actor.flat.zero_()
    last_bias = sac.target_critics._layers[-1][1]
    sac.target_critics.flat.zero_()
    last_bias[:, 0, 0] = torch.arange(6.0)
    batch = make_batch()
    rows = batch.not_terminated > 0
    chosen = {round(((sac.targets(batch) - batch.training_rewards) / 0.9)[rows][0].item()) for _ in range(60)}
    assert chosen == set(range(6))


def test_actions_lie_in_the_space_and_depend_on_own_generators_only():
    sac = SAC(SPEC, SPACE, SACConfig(), SMALL, seed=3)
    obs = np.random.default_rng(0).normal(size=(500, 5)).astype(np.float32) * 100
    before = torch.random.get_rng_state()
    drawn, steady = sac.act(obs), sac.act(obs, deterministic=True)
    sac.update(make_batch())
    assert torch.equal(torch.random.get_rng_state(), before)
    for actions in (drawn, steady):
        assert actions.shape == (500, 2) and actions.dtype == np.float32
        assert (actions >= SPACE.low).all() and (actions <= SPACE.high).all()
    assert np.array_equal(steady, SAC(SPEC, SPACE, SACConfig(), SMALL, seed=3).act(obs, deterministic=True))
    assert not np.array_equal(drawn, steady)


@pytest.mark.parametrize("images", [False, True])
def test_exact_continuation(images):
    spec = ObsSpec(state_size=5, images=(("front", (16, 16, 3)),)) if images else SPEC
    network = NetworkConfig(hidden=(16,), layer_norm=True, image_features=8)
    cfg = SACConfig(num_critics=4, actor_every=2, bc_coef=0.1)
    first, second = (SAC(spec, SPACE, cfg, network, seed=seed) for seed in (0, 1))
    for step in range(3):
        first.update(make_batch(seed=step, images=images), prior_rows=8)
    second.load_state_dict(first.state_dict())
    frozen = first.state_dict()
    obs = {name: part.numpy() for name, part in make_batch(images=images).obs.items()}
    for step in range(3, 7):
        batch = make_batch(seed=step, images=images)
        assert first.update(batch, prior_rows=8) == second.update(batch, prior_rows=8)
        assert np.array_equal(first.act(obs), second.act(obs))
    assert torch.equal(first.critics.flat, second.critics.flat)
    assert not torch.equal(frozen["critics"], first.critics.flat)
    for name, part in first.encoder.state_dict().items():  # it learns in updates, too
        assert not torch.equal(part, frozen["encoder"][name])


def test_the_encoder_follows_the_critics_alone():
    spec = ObsSpec(state_size=5, images=(("front", (16, 16, 3)),))
    network = NetworkConfig(hidden=(16,), image_features=8)
    sac, batch = SAC(spec, SPACE, SACConfig(), network, seed=0), make_batch(images=True)
    before = copy.deepcopy(sac.encoder.state_dict())
    features = sac.encoder(batch.obs)
    update_actor(sac, features.detach())
    assert all(torch.equal(part, before[name]) for name, part in sac.encoder.state_dict().items())
    goal = torch.zeros(32)
    losses = [sac._update_critics(sac.encoder(batch.obs), batch.actions / 10, goal)["critic_loss"]]
    assert all(not torch.equal(part, before[name]) for name, part in sac.encoder.state_dict().items())
    for _ in range(60):
        losses.append(sac._update_critics(sac.encoder(batch.obs), batch.actions / 10, goal)["critic_loss"])
    assert losses[-1] < 0.5 * losses[0]


def test_images_are_shifted_like_padded_ones():
    images = torch.randint(
        0, 256, (6, 9, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    moves = torch.tensor([[0, 0], [2, 1], [-3, 2], [3, -3], [0, -2], [-1, 0]])[:, :, None]
    padded = torch.nn.functional.pad(images.permute(0, 3, 1, 2).float(), (3, 3, 3, 3), mode="replicate")
    for image, move, wide in zip(shift_images(images, moves), moves[:, :, 0].tolist(), padded, strict=True):
        down, right = move
        expected = wide[:, 3 - down : 12 - down, 3 - right : 10 - right].permute(1, 2, 0)
        assert torch.equal(image.float(), expected)


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="needs bounds"):
        SAC(SPEC, gym.spaces.Box(-np.inf, np.inf, (2,)), SACConfig(), SMALL, seed=0)
    with pytest.raises(ConfigError, match="actions that are vectors"):
        SAC(SPEC, gym.spaces.Discrete(3), SACConfig(), SMALL, seed=0)
    with pytest.raises(ConfigError, match="num_min_critics is 3"):
        SAC(SPEC, SPACE, SACConfig(num_min_critics=3), SMALL, seed=0)
    sac = SAC(SPEC, SPACE, SACConfig(), SMALL, seed=0)
    with pytest.raises(DataError, match="40 demonstrations in a batch of 32"):
        sac.update(make_batch(), prior_rows=40)
    with pytest.raises(DataError, match="of another size"):
        sac.load_state_dict(SAC(SPEC, SPACE, SACConfig(num_critics=3), SMALL, seed=0).state_dict())


FAST = SACConfig(actor_lr=1e-3, critic_lr=1e-3, alpha_lr=1e-3, learning_starts=500)
PENDULUM = Task(
    env="Pendulum-v1", steps=4_500, cfg=FAST, network=NetworkConfig(hidden=(64, 64), activation="relu")
)


@pytest.mark.slow
def test_it_learns_to_swing_up():
    env = make("Pendulum-v1")
    sac = make_learner(PENDULUM, env, seed=0)
    train(PENDULUM, sac, env, seed=0)
    assert mean_return(PENDULUM, lambda obs: sac.act(obs, deterministic=True)) > -250.0  # at random: -1200


def swing_up(obs: np.ndarray) -> np.ndarray:
    """A teacher: bring the energy to that of the upright pendulum, then hold it there; about -140."""
    cos, sin, speed = obs.T
    missing = 15.0 - (0.5 * speed**2 + 15.0 * cos)
    pump = missing * np.sign(speed + 1e-6)
    hold = -(12.0 * np.arctan2(sin, cos) + 3.0 * speed)
    return np.clip(np.where(cos > 0.9, hold, pump), -2.0, 2.0).astype(np.float32)[:, None]


@pytest.fixture(scope="module")
def demonstrations():
    env = make("Pendulum-v1")
    prior = make_replay(env, 2_000, seed=0)
    obs, _ = env.reset(seed=7)
    for _ in range(2_000):
        actions = swing_up(obs)
        reached, env_rewards, terminated, truncated, info = env.step(actions)
        final = with_final(reached, info.get("final_obs"), terminated | truncated)
        prior.add(obs, actions, env_rewards, terminated, truncated, final)
        obs = reached
    return prior


def with_demonstrations(demonstrations, reward_scale: float, steps: int, **settings) -> float:
    """RLPD: half of each batch from a teacher, critics with layer norm, a random pair of four."""
    chosen = {"num_critics": 4, "learning_starts": 200, "tau": 0.02, "initial_alpha": 0.1, **settings}
    network = NetworkConfig(hidden=(64, 64), activation="relu", layer_norm=True)
    task = Task(env="Pendulum-v1", steps=steps, cfg=replace(FAST, **chosen), network=network)
    env = make("Pendulum-v1")
    sac = make_learner(task, env, seed=0)
    train(task, sac, env, seed=0, prior=demonstrations, reward_scale=reward_scale)
    return mean_return(task, lambda obs: sac.act(obs, deterministic=True))


@pytest.mark.slow
def test_the_options_of_rlpd_learn(demonstrations):
    assert with_demonstrations(demonstrations, 1.0, 2_000) > -400.0


@pytest.mark.slow
def test_without_rewards_the_pull_to_demonstrations_is_what_teaches(demonstrations):
    pulled = with_demonstrations(demonstrations, 0.0, 1_200, bc_coef=30.0)
    left_alone = with_demonstrations(demonstrations, 0.0, 1_200, bc_coef=0.0)
    assert left_alone < -800.0
    assert pulled > left_alone + 300.0


def test_imitation_alone_copies_a_teacher():
    sac = SAC(SPEC, SPACE, SACConfig(actor_lr=3e-3), SMALL, seed=0)
    batch = make_batch(256)
    actions = torch.stack([batch.obs["state"][:, 0].clamp(-1.5, 1.5), 5 + batch.obs["state"][:, 1]], 1)
    errors = [sac.imitate(batch.obs, actions) for _ in range(300)]
    assert errors[-1] < 0.05 * errors[0]
    assert np.abs(sac.act(batch.obs["state"].numpy(), deterministic=True) - actions.numpy()).mean() < 0.4
