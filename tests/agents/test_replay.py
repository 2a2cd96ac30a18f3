"""The ring against a plain list of transitions, and what survives saving."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guerdon.agents.networks import ObsSpec
from guerdon.agents.replay import ReplayBuffer, ReplayParts
from guerdon.core.batches import TrainBatch, n_step_return
from guerdon.core.errors import ConfigError, DataError

SPEC = ObsSpec(state_size=2, images=(("front", (4, 4, 1)),))
GAMMA = 0.9


def observation(env: np.ndarray, count: np.ndarray) -> dict[str, np.ndarray]:
    """Observations that tell themselves apart: (environment, number of the observation)."""
    state = np.stack([env, count], 1).astype(np.float32)
    images = np.broadcast_to((count % 251)[:, None, None, None], (len(env), 4, 4, 1)).astype(np.uint8)
    return {"state": state, "front": images}


@dataclass
class Step:
    """One step of one environment, as a plain record."""

    obs: float
    next_obs: float
    action: float
    env_reward: float
    terminated: bool
    truncated: bool
    score: float


@dataclass
class Experience:
    """A buffer and the plain list of the same steps, of each environment."""

    buffer: ReplayBuffer
    steps: list[list[Step]] = field(default_factory=list)

    def valid(self) -> dict[tuple[int, float], int]:
        """(environment, observation) -> place in the list, of what can be sampled."""
        found = {}
        rows = self.buffer.num_rows
        for env, steps in enumerate(self.steps):
            for place in range(max(len(steps) - rows, 0), len(steps)):
                ended = steps[place].terminated or steps[place].truncated
                if ended or place + 1 < len(steps):
                    found[env, steps[place].obs] = place
        return found


def experience(seed: int, num_envs: int, num_rows: int, num_steps: int, end_rate: float) -> Experience:
    """Play random episodes into a buffer and a list."""
    rng = np.random.default_rng(seed)
    buffer = ReplayBuffer(
        SPEC, (1,), np.float32, num_envs, num_rows * num_envs, {"score": ((), np.float32)}, seed=seed
    )
    held = Experience(buffer, [[] for _ in range(num_envs)])
    envs, count = np.arange(num_envs), np.zeros(num_envs, np.int64)
    for _ in range(num_steps):
        ends = rng.random(num_envs) < end_rate
        terminated = ends & (rng.random(num_envs) < 0.5)
        truncated = ends & ~terminated
        actions = rng.normal(size=(num_envs, 1)).astype(np.float32)
        env_rewards, score = rng.normal(size=(2, num_envs)).astype(np.float32)
        reached = observation(envs, count + 1)
        final = reached if ends.any() else None
        buffer.add(observation(envs, count), actions, env_rewards, terminated, truncated, final, score=score)
        for env in range(num_envs):
            step = Step(
                obs=count[env],
                next_obs=count[env] + 1,
                action=actions[env, 0],
                env_reward=env_rewards[env],
                terminated=terminated[env],
                truncated=truncated[env],
                score=score[env],
            )
            held.steps[env].append(step)
        count += np.where(ends, 2, 1)  # the new episode begins with an observation of its own
    return held


cases = st.tuples(
    st.integers(0, 10_000), st.integers(1, 3), st.integers(2, 9), st.integers(2, 25), st.floats(0.0, 1.0)
)


@settings(max_examples=80, deadline=None)
@given(cases, st.integers(1, 4))
def test_samples_are_those_of_a_plain_list(case, n):
    held = experience(*case)
    valid = held.valid()
    batch = held.buffer.sample(60, gamma=GAMMA, num_n_steps=n)
    learned = batch.train_batch(batch.env_rewards)
    for b in range(60):
        env, start = (int(value) for value in batch.obs["state"][b])
        place = valid[env, start]  # a KeyError here is a row that must not be sampled
        window = []
        for step in held.steps[env][place : place + n]:
            if (env, step.obs) not in valid:
                break
            window.append(step)
            if step.terminated or step.truncated:
                break
        k = len(window)
        assert batch.actions[b, 0] == window[0].action
        assert batch.next_obs["state"][b].tolist() == [env, window[-1].next_obs]
        assert batch.next_obs["front"][b].unique().tolist() == [window[-1].next_obs % 251]
        assert batch.obs["front"][b].unique().tolist() == [start % 251]
        assert batch.mask[b].tolist() == [1.0] * k + [0.0] * (n - k)
        assert batch.env_rewards[b].tolist() == [step.env_reward for step in window] + [0.0] * (n - k)
        assert batch.extras["score"][b, :k].tolist() == [step.score for step in window]
        assert batch.terminated[b] == window[-1].terminated
        assert batch.truncated[b] == window[-1].truncated
        assert batch.discount[b].item() == pytest.approx(GAMMA**k, rel=1e-5)
        plain = sum(GAMMA**i * step.env_reward for i, step in enumerate(window))
        assert learned.training_rewards[b].item() == pytest.approx(plain, abs=1e-4)
        assert learned.not_terminated[b] == 1.0 - window[-1].terminated


@pytest.mark.parametrize("end_rate", [0.0, 0.2, 1.0])
def test_every_valid_row_is_drawn_equally_often(end_rate):
    held = experience(1, 3, 6, 20, end_rate)
    valid = held.valid()
    drawn = held.buffer.sample(60_000, gamma=GAMMA).obs["state"].long().tolist()
    counts = dict.fromkeys(valid, 0)
    for env, start in drawn:
        counts[env, start] += 1
    expected = 60_000 / len(valid)
    assert len(valid) == {0.0: 15, 1.0: 18}.get(end_rate, len(valid))
    assert max(abs(count - expected) for count in counts.values()) < 5 * expected**0.5


def test_rows_lead_back_to_extras_and_env_rewards_stay():
    held = experience(3, 2, 8, 30, 0.2)
    before = held.buffer.state_dict()["step/env_rewards"]
    batch = held.buffer.sample(64, gamma=GAMMA, num_n_steps=3)
    batch.train_batch(torch.zeros(64, 3))
    state = held.buffer.state_dict()
    assert (state["step/score"].reshape(-1)[batch.rows] == batch.extras["score"].numpy()).all()
    assert (state["step/env_rewards"] == before).all()


def test_transitions_that_stand_alone_are_added_at_once():
    """The same samples as from adding them one by one; the oldest make room."""
    rng = np.random.default_rng(0)
    buffers = [ReplayBuffer(ObsSpec(state_size=2), (), np.int64, 1, 50, seed=0) for _ in range(2)]
    for count in (7, 30, 40, 120):
        obs, after = rng.normal(size=(2, count, 2)).astype(np.float32)
        ended = rng.random(count) < 0.3
        values = {
            "actions": rng.integers(3, size=count),
            "env_rewards": rng.normal(size=count).astype(np.float32),
            "terminated": ended,
            "truncated": ~ended,
        }
        buffers[0].add_transitions({"state": obs}, values, {"state": after})
        for t in range(count):
            row = slice(t, t + 1)
            buffers[1].add({"state": obs[row]}, *(v[row] for v in values.values()), {"state": after[row]})
        assert len(buffers[0]) == len(buffers[1]) and len(buffers[0]._finals["state"]) <= 2 * 50
        one, other = (buffer.sample(200, gamma=0.9) for buffer in buffers)
        assert torch.equal(one.obs["state"], other.obs["state"])
        assert torch.equal(one.next_obs["state"], other.next_obs["state"])
        assert torch.equal(one.env_rewards, other.env_rewards) and torch.equal(one.actions, other.actions)
        assert torch.equal(one.terminated, other.terminated)


def test_a_cut_episode_is_truncated_and_does_not_run_into_the_next():
    buffer = ReplayBuffer(ObsSpec(state_size=1), (), np.int64, 1, 10, seed=0)
    no = np.array([False])
    for value in (0.0, 1.0):
        buffer.add(np.array([[value]]), np.array([0]), np.array([1.0]), no, no)
    buffer.truncate_running_episodes(np.array([[2.0]]))
    buffer.add(np.array([[50.0]]), np.array([0]), np.array([1.0]), no, no)
    batch = buffer.sample(100, gamma=GAMMA, num_n_steps=2)
    pairs = torch.cat([batch.obs["state"], batch.next_obs["state"]], 1)
    seen = {tuple(pair) for pair in pairs.tolist()}
    assert seen == {(0.0, 2.0), (1.0, 2.0)}
    assert batch.truncated.all() and not batch.terminated.any()


def test_episodes_of_some_environments_are_cut_and_those_of_others_go_on():
    buffer = ReplayBuffer(ObsSpec(state_size=1), (), np.int64, 2, 20, seed=0)
    no = np.zeros(2, np.bool_)
    for obs in ([[0.0], [10.0]], [[50.0], [11.0]]):
        buffer.add(np.array(obs), np.zeros(2, np.int64), np.ones(2), no, no)
        if obs[0][0] == 0.0:
            buffer.truncate_running_episodes(np.array([[1.0], [11.0]]), slice(0, 1))
    batch = buffer.sample(200, gamma=GAMMA)
    rows = torch.cat([batch.obs["state"], batch.next_obs["state"], batch.truncated[:, None].float()], 1)
    assert {tuple(row) for row in rows.tolist()} == {(0.0, 1.0, 1.0), (10.0, 11.0, 0.0)}


def test_an_image_is_stored_once():
    spec = ObsSpec(state_size=0, images=(("front", (64, 64, 3)),))
    buffer = ReplayBuffer(spec, (4,), np.float32, 4, 1000, seed=0)
    obs = {"front": np.zeros((4, 64, 64, 3), np.uint8)}
    for step in range(1000 // 4):
        ended = np.full(4, step % 50 == 49)
        buffer.add(obs, np.zeros((4, 4), np.float32), np.zeros(4, np.float32), ended & False, ended, obs)
    images = 500_000 * 12_288
    assert images < buffer.nbytes * 500 < 1.06 * images


def test_final_observations_do_not_pile_up():
    sizes = [len(experience(0, 2, 5, steps, 0.5).buffer._finals["state"]) for steps in (50, 500)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("num_steps", [6, 25])
def test_a_restored_buffer_goes_on_alike(tmp_path, num_steps):
    held = experience(5, 2, 8, num_steps, 0.3)
    path = tmp_path / "replay.npz"
    held.buffer.sample(7, gamma=GAMMA)
    held.buffer.save(path)
    other = experience(6, 2, 8, 4, 0.3).buffer
    other.load(path)
    for buffer in (held.buffer, other):
        for step in range(12):
            ended = np.array([step == 3, step == 7])
            reached = observation(np.arange(2), np.full(2, 200 + step))
            action = np.zeros((2, 1), np.float32)
            buffer.add(reached, action, np.ones(2), ended, ended & False, reached, score=np.zeros(2))
    for _ in range(5):
        first, second = (buffer.sample(32, gamma=GAMMA, num_n_steps=3) for buffer in (held.buffer, other))
        assert (first.rows == second.rows).all()
        for name in ("state", "front"):
            assert torch.equal(first.obs[name], second.obs[name])
            assert torch.equal(first.next_obs[name], second.next_obs[name])
        assert torch.equal(first.env_rewards, second.env_rewards)
    assert [each.name for each in tmp_path.iterdir()] == ["replay.npz"]


@pytest.mark.parametrize("played", [0, 4])
def test_a_restored_buffer_knows_which_final_observations_it_keeps(played):
    held = experience(5, 2, 8, 6, 1.0).buffer  # every step ends an episode: 12 final observations
    other = experience(6, 2, 8, played, 1.0).buffer  # has room of its own, or none yet
    other.load_state_dict(held.state_dict())
    room = len(held._finals["state"])
    ended, score = np.ones(2, np.bool_), np.zeros(2)
    for step in range(40):  # as many are kept as the ring holds: 16
        if step == 1:
            batch = other.sample(400, gamma=GAMMA)
            assert len(np.unique(batch.rows)) == 14
            later = batch.obs["state"][:, 1] == 500
            after = torch.where(later, 900.0, batch.obs["state"][:, 1] + 1)  # none was written over
            assert torch.equal(batch.next_obs["state"][:, 1], after)
        obs, reached = (observation(np.arange(2), np.full(2, count)) for count in (500, 900))
        other.add(obs, np.zeros((2, 1), np.float32), score, ended, ended & False, reached, score=score)
    assert len(other._finals["state"]) == room  # and none was forgotten


def test_a_state_dict_is_a_copy():
    held = experience(5, 2, 8, 10, 0.3)
    state = held.buffer.state_dict()
    kept = state["obs/state"].copy()
    held.buffer._obs["state"][:] = -1.0
    assert (state["obs/state"] == kept).all()


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="too small for 4 environments"):
        ReplayBuffer(SPEC, (1,), np.float32, 4, 7, seed=0)
    with pytest.raises(ConfigError, match="cannot be called truncated"):
        ReplayBuffer(SPEC, (1,), np.float32, 4, 80, {"truncated": ((), np.float32)}, seed=0)
    buffer = ReplayBuffer(ObsSpec(state_size=1), (), np.int64, 1, 10, seed=0)
    no, yes, one = np.array([False]), np.array([True]), np.ones((1, 1))
    with pytest.raises(DataError, match="no complete transition"):
        buffer.sample(1, gamma=GAMMA)
    buffer.add(one, np.array([0]), np.array([1.0]), no, no)
    with pytest.raises(DataError, match="no complete transition"):
        buffer.sample(1, gamma=GAMMA)
    with pytest.raises(DataError, match="final observation was not given"):
        buffer.add(one, np.array([0]), np.array([1.0]), yes, no)
    with pytest.raises(DataError, match="state has shape"):
        buffer.add(np.ones((1, 2)), np.array([0]), np.array([1.0]), no, no)
    with pytest.raises(DataError, match="the replay buffer keeps"):
        buffer.add(one, np.array([0]), np.array([1.0]), no, no, score=np.array([1.0]))
    with pytest.raises(DataError, match="rows of 1 environments"):
        buffer.load_state_dict(ReplayBuffer(ObsSpec(state_size=1), (), np.int64, 1, 20, seed=0).state_dict())
    held = experience(0, 2, 4, 3, 0.0).buffer
    floats = {name: part.astype(np.float32) for name, part in observation(np.arange(2), np.arange(2)).items()}
    flags = np.zeros(2, np.bool_)
    with pytest.raises(DataError, match="keeps images as uint8"):
        held.add(floats, np.zeros((2, 1)), np.zeros(2), flags, flags, score=np.zeros(2))
    (tmp_path / "broken.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"cannot read the replay buffer .*broken\.npz"):
        buffer.load(tmp_path / "broken.npz")


def test_rewards_of_steps_that_do_not_count_are_not_read():
    rewards = torch.tensor([[1.0, 2.0, float("nan")], [1.0, 2.0, 4.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    assert n_step_return(rewards, mask, 0.5).tolist() == [2.0, 3.0]
    with pytest.raises(DataError, match="do not fit"):
        n_step_return(torch.ones(2), mask, 0.5)


def test_a_train_batch_is_checked_and_joined():
    held = experience(5, 2, 8, 10, 0.3)
    first, second = (held.buffer.sample(count, gamma=GAMMA) for count in (3, 5))
    parts = [first.train_batch(torch.ones(3, 1)), second.train_batch(torch.zeros(5, 1))]
    joined = TrainBatch.cat(parts)
    assert joined.training_rewards.tolist() == [1.0] * 3 + [0.0] * 5
    assert torch.equal(joined.next_obs["front"][3:], second.next_obs["front"])
    with pytest.raises(DataError, match=r"training_rewards must have shape \[3\]"):
        TrainBatch(**{**vars(parts[0]), "training_rewards": torch.ones(3, 1)})


def test_a_cut_leaves_episodes_alone_that_have_ended():
    replay = ReplayBuffer(ObsSpec(state_size=1), (), np.int64, 2, 20, seed=0)
    zeros, no = np.zeros(2), np.zeros(2, np.bool_)
    replay.add(np.array([[1.0], [2.0]], np.float32), zeros, zeros, no, no)
    ends = np.array([True, False])
    replay.add(np.array([[3.0], [4.0]], np.float32), zeros, zeros, ends, no, np.array([[5.0], [9.0]]))
    for _ in range(2):  # the second time there is nothing left to truncate
        # 7 begins the next episode of the first
        replay.truncate_running_episodes(np.array([[7.0], [6.0]], np.float32))
        batch = replay.sample(200, gamma=0.9)
        flags = zip(batch.terminated.tolist(), batch.truncated.tolist(), strict=True)
        pairs = zip(batch.obs["state"][:, 0].tolist(), batch.next_obs["state"][:, 0].tolist(), strict=True)
        assert dict(zip(pairs, flags, strict=True)) == {
            (1.0, 3.0): (False, False),
            (2.0, 4.0): (False, False),
            (3.0, 5.0): (True, False),
            (4.0, 6.0): (False, True),
        }


# Several buffers as one


def counted(num_envs, rows, first, seed=0):
    buffer = ReplayBuffer(ObsSpec(state_size=1), (1,), np.float32, num_envs, 100 * num_envs, seed=seed)
    none = np.zeros(num_envs, np.bool_)
    for row in range(rows):
        obs = np.full((num_envs, 1), first + row, np.float32)
        buffer.add(obs, np.zeros((num_envs, 1), np.float32), obs[:, 0], none, none)
    return buffer


def test_parts_are_sampled_by_what_they_hold(tmp_path):
    parts = ReplayParts([counted(1, 11, 0), counted(3, 11, 100), counted(2, 1, 200)], seed=0)
    assert len(parts) == 11 + 33 + 2
    assert [part.num_complete for part in parts.parts] == [10, 30, 0]  # the latest step has no successor yet
    batch = parts.sample(8000, gamma=0.9)
    rewards = batch.env_rewards[:, 0].numpy()
    assert len(batch) == 8000 and rewards.max() == 109
    assert (rewards >= 100).mean() == pytest.approx(0.75, abs=0.02)
    np.testing.assert_array_equal(batch.obs["state"][:, 0], rewards)
    np.testing.assert_array_equal(batch.next_obs["state"][:, 0], rewards + 1)
    values, counts = np.unique(rewards[rewards < 100], return_counts=True)
    assert values.tolist() == list(range(10)) and counts.min() > 120  # of 200
    parts.truncate_running_episodes([np.zeros((1, 1)), np.zeros((3, 1)), np.full((2, 1), 201.0)])
    assert [part.num_complete for part in parts.parts] == [11, 33, 2]
    parts.save(tmp_path / "replay.npz")
    again = ReplayParts([counted(1, 0, 0), counted(3, 0, 0), counted(2, 0, 0)], seed=0)
    again.load(tmp_path / "replay.npz")
    assert len(again) == len(parts)
    with pytest.raises(DataError, match=r"another number of env workers: 2 now, but there is replay_2\.npz"):
        ReplayParts([counted(1, 0, 0), counted(3, 0, 0)], seed=0).load(tmp_path / "replay.npz")


def test_parts_without_a_transition_are_refused():
    with pytest.raises(DataError, match="no complete transition"):
        ReplayParts([counted(1, 1, 0), counted(1, 0, 0)], seed=0).sample(4, gamma=0.9)
