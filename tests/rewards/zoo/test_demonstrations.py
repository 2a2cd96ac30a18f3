"""Demonstrations in every form that is read, and the command that collects them."""

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from guerdon.cli.main import main
from guerdon.cli.zoo import collect_demos
from guerdon.core.errors import ConfigError, DataError, UnsafeDataError
from guerdon.core.types import Episode
from guerdon.data.store import StoreWriter
from guerdon.rewards import StepBatch, create_reward_model, read_demonstrations, write_demonstrations
from guerdon.rewards.steps import to_items
from guerdon.rewards.zoo.demonstrations import returns_of
from guerdon.rewards.zoo.synthetic import same, synthetic_steps
from tests.rewards.zoo.zoo_tasks import FIXED_CARTPOLE, POINT_REACH
from tests.training.serial_tools import small

DISCRETE = {"obs_shape": 4, "action_size": 2, "discrete_actions": True}
CONTINUOUS = {"obs_shape": 4, "action_size": 2, "discrete_actions": False}


def episodes(shapes=DISCRETE):
    """Three whole ones, of unequal length; the second ends by itself."""
    made = [synthetic_steps(shapes, length, 1, seed) for seed, length in enumerate((5, 8, 3))]
    flip = {"terminated": made[1].truncated, "truncated": made[1].terminated}
    made[1] = StepBatch(**{**made[1].parts(), **flip})
    return made


def without_log_probs(rows):
    return [StepBatch(**{k: v for k, v in each.parts().items() if k != "log_probs"}) for each in rows]


def alike(read, wanted):
    return len(read) == len(wanted) and all(map(same, read, wanted))


def test_our_file(tmp_path):
    write_demonstrations(tmp_path / "demos.safetensors", episodes(CONTINUOUS))
    assert alike(read_demonstrations(tmp_path / "demos.safetensors"), episodes(CONTINUOUS))
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match="holds no demonstrations"):
        read_demonstrations(tmp_path / "bad.safetensors")
    with pytest.raises(DataError, match="whole episodes"):
        write_demonstrations(tmp_path / "cut.safetensors", [episodes()[0][:3]])
    with pytest.raises(DataError, match="there are no demonstrations at"):
        read_demonstrations(tmp_path / "none.safetensors")
    with pytest.raises(DataError, match="no demonstrations that are known"):
        (tmp_path / "demos.txt").write_text("a")
        read_demonstrations(tmp_path / "demos.txt")


# DI-engine


def di_engine_items(rows):
    """Items as its collectors make them: tensors, rewards of one entry, further keys."""
    items = [item for each in rows for item in to_items(each)]
    return [
        {
            **{key: value for key, value in item.items() if key != "truncated"},
            "action": item["action"].reshape(-1),
            "reward": item["reward"].reshape(1),
            "logit": torch.zeros(2),
            "collect_iter": 3,
        }
        for item in items
    ]


def test_a_file_of_di_engine(tmp_path):
    path = tmp_path / "run" / "expert_data.pkl"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(di_engine_items(episodes())))
    for place in (path, path.parent):  # newer ones name the folder
        read = read_demonstrations(place)
        assert [len(each) for each in read] == [5, 8, 3]
        for one, wanted in zip(read, episodes(), strict=True):
            assert torch.equal(one.obs, wanted.obs) and torch.equal(one.actions, wanted.actions)
            assert torch.equal(one.next_obs, wanted.next_obs) and one.actions.dtype == torch.int64
            assert torch.equal(one.env_rewards, wanted.env_rewards) and bool(one.done[-1])


def test_pieces_of_several_environments_are_told_apart(tmp_path):
    """Samples of one collection end where the collector stopped, without `done`."""
    items = di_engine_items([episodes()[0][:3], episodes()[1][:4]])
    (tmp_path / "expert_data.pkl").write_bytes(pickle.dumps(items))
    read = read_demonstrations(tmp_path)
    assert [len(each) for each in read] == [3, 4]
    assert not read[0].terminated.any() and bool(read[0].truncated[-1])


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("owned"),)


def test_a_file_with_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "expert_data.pkl").write_bytes(pickle.dumps([Evil()]))
    with pytest.raises(UnsafeDataError, match="nothing was run"):
        read_demonstrations("expert_data.pkl")
    assert not Path("owned").exists()


# imitation


def imitation_columns(rows):
    obs = [torch.cat([each.obs, each.next_obs[-1:]]).numpy() for each in rows]
    return {
        "obs": obs,
        "acts": [each.actions.numpy() for each in rows],
        "infos": [["{}"] * len(each) for each in rows],
        "terminal": [bool(each.terminated[-1]) for each in rows],
        "rews": [each.env_rewards.numpy() for each in rows],
    }


@pytest.mark.parametrize("shapes", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("layout", ["stream", "file"])
def test_trajectories_of_imitation(tmp_path, shapes, layout):
    columns = {
        name: [each.tolist() if isinstance(each, np.ndarray) else each for each in column]
        for name, column in imitation_columns(episodes(shapes)).items()
    }
    table = pa.table(columns)
    (tmp_path / "dataset_info.json").write_text("{}")
    open_writer = pa.ipc.new_stream if layout == "stream" else pa.ipc.new_file
    place = str(tmp_path / "data-00000-of-00001.arrow")
    with pa.OSFile(place, "wb") as sink, open_writer(sink, table.schema) as writer:
        writer.write_table(table)
    assert alike(read_demonstrations(tmp_path), without_log_probs(episodes(shapes)))


def test_older_trajectories_of_imitation(tmp_path):
    rows = episodes()
    columns = imitation_columns(rows)
    np.savez(
        tmp_path / "expert.npz",
        obs=np.concatenate(columns["obs"]),
        acts=np.concatenate(columns["acts"]),
        infos=np.array([{}] * 16, dtype=object),
        terminal=np.array(columns["terminal"]),
        rews=np.concatenate(columns["rews"]),
        indices=np.cumsum([len(each) for each in rows[:-1]]),
    )
    assert alike(read_demonstrations(tmp_path / "expert.npz"), without_log_probs(rows))
    np.savez(tmp_path / "other.npz", states=np.zeros(3))
    with pytest.raises(DataError, match=r"wanted are obs .* and actions .*found are"):
        read_demonstrations(tmp_path / "other.npz")
    (tmp_path / "torn.npz").write_bytes((tmp_path / "expert.npz").read_bytes()[:200])
    with pytest.raises(DataError, match="is damaged"):
        read_demonstrations(tmp_path / "torn.npz")


def test_trajectories_that_do_not_add_up(tmp_path):
    table = pa.table({"obs": [[[0.0], [1.0]]], "acts": [[0, 1]], "terminal": [True]})
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    with pytest.raises(DataError, match="trajectory 0 has 2 observations, 2 actions"):
        read_demonstrations(tmp_path)
    (tmp_path / "data.arrow").write_bytes(b"torn")
    with pytest.raises(DataError, match="is damaged"):
        read_demonstrations(tmp_path)


# Arrays of one's own


def arrays(rows):
    """All episodes in a row, as [N] arrays."""
    flat = StepBatch.cat(without_log_probs(rows))
    return {name: part.numpy() for name, part in flat.parts().items()}


def named(rows, form):
    """The same episodes under the names, and with the marks, of several libraries."""
    flat, lengths = arrays(rows), [len(each) for each in rows]
    base = {"observations": flat["obs"], "actions": flat["actions"], "rewards": flat["env_rewards"]}
    reached = {"next_observations": flat["next_obs"]}
    done = flat["terminated"] | flat["truncated"]
    starts = np.concatenate(([True], done[:-1]))
    forms = {
        "d4rl": {**base, **reached, "terminals": flat["terminated"], "timeouts": flat["truncated"]},
        "gymnasium": {
            "obs": flat["obs"], "acts": flat["actions"], "rews": flat["env_rewards"],
            "next_obs": flat["next_obs"], "terminated": flat["terminated"], "truncated": flat["truncated"],
        },
        "sb3": {
            "obs": flat["obs"], "actions": flat["actions"], "rewards": flat["env_rewards"],
            "next_obs": flat["next_obs"], "episode_starts": starts, "terminals": flat["terminated"],
        },
        "ends": {**base, **reached, "episode_ends": np.cumsum(lengths), "terminals": flat["terminated"]},
        "dones": {**base, **reached, "dones": done[:, None], "timeouts": flat["truncated"]},
        "one more": {
            "states": np.concatenate([np.concatenate((each.obs, each.next_obs[-1:])) for each in rows]),
            "actions": flat["actions"], "rewards": flat["env_rewards"], "episode_ends": np.cumsum(lengths),
            "terminals": flat["terminated"],
        },
    }  # fmt: skip
    return forms[form]


@pytest.mark.parametrize("shapes", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize("form", ["d4rl", "gymnasium", "sb3", "ends", "dones", "one more"])
def test_arrays_under_the_names_that_people_use(tmp_path, form, shapes):
    rows = episodes(shapes)
    columns, wanted = named(rows, form), without_log_probs(rows)
    assert alike(read_demonstrations(columns), wanted)
    np.savez_compressed(tmp_path / "demos.npz", **columns)
    assert alike(read_demonstrations(tmp_path / "demos.npz"), wanted)
    (tmp_path / "demos.pkl").write_bytes(pickle.dumps(columns))
    assert alike(read_demonstrations(tmp_path / "demos.pkl"), wanted)


def test_without_the_last_observation_the_last_step_is_left_out(tmp_path):
    rows = episodes()
    flat = arrays(rows)
    np.savez(
        tmp_path / "demos.npz",
        obs=flat["obs"],
        acts=flat["actions"],
        dones=flat["terminated"] | flat["truncated"],
    )
    read = read_demonstrations(tmp_path / "demos.npz")
    assert [len(each) for each in read] == [4, 7, 2]
    for one, whole in zip(read, rows, strict=True):
        assert torch.equal(one.obs, whole.obs[:-1]) and torch.equal(one.next_obs, whole.next_obs[:-1])
        assert one.env_rewards.isnan().all() and bool(one.done[-1]) and int(one.done.sum()) == 1


def test_lists_of_episodes():
    rows = episodes()
    wanted = without_log_probs(rows)
    dicts = [
        {
            "obs": torch.cat((each.obs, each.next_obs[-1:])), "actions": each.actions.tolist(),
            "rewards": each.env_rewards, "terminated": each.terminated,
        }
        for each in rows
    ]  # fmt: skip
    assert alike(read_demonstrations(dicts), wanted)
    assert alike(read_demonstrations(dicts[:1]), wanted[:1]) and alike(
        read_demonstrations(dicts[0]), wanted[:1]
    )
    assert alike(read_demonstrations([to_items(each) for each in rows]), wanted)
    plural = [
        {"obs": item["obs"], "actions": item["action"], "rewards": item["reward"], "dones": item["done"],
         "next_obs": item["next_obs"], "truncated": item["truncated"]}
        for each in rows for item in to_items(each)
    ]  # fmt: skip
    assert alike(read_demonstrations(plural), wanted)

    class Trajectory:
        def __init__(self, each):
            self.obs, self.acts = torch.cat((each.obs, each.next_obs[-1:])).numpy(), each.actions.numpy()
            self.rews, self.terminal = each.env_rewards.numpy(), bool(each.terminated[-1])

    assert alike(read_demonstrations([Trajectory(each) for each in rows]), wanted)


def test_other_keys_of_a_transition_do_not_stand_in_for_its_own():
    wanted = without_log_probs(episodes())
    more = {"state": np.zeros(9), "rewards": 5.0, "terminals": False}
    items = [{**item, **more} for each in episodes() for item in to_items(each)]
    assert alike(read_demonstrations(items), wanted)


def test_a_file_of_too_many_episodes_is_refused(tmp_path):
    count = 100_001
    np.savez(tmp_path / "a.npz", obs=np.zeros((count, 1)), acts=np.zeros(count), dones=np.ones(count, bool))
    with pytest.raises(DataError, match="at most 100000 are read"):
        read_demonstrations(tmp_path / "a.npz")


def test_episodes_side_by_side_and_goals():
    same_length = [synthetic_steps(CONTINUOUS, 6, 1, seed) for seed in range(3)]
    flat = [arrays([each]) for each in same_length]
    names = {"obs": "obs", "next_obs": "next_obs", "actions": "actions", "rewards": "env_rewards"}
    columns = {ours: np.stack([each[theirs] for each in flat]) for ours, theirs in names.items()}
    read = read_demonstrations(columns)
    assert [len(each) for each in read] == [6, 6, 6]
    assert all(torch.equal(one.obs, each.obs) for one, each in zip(read, same_length, strict=True))
    parts = {"observation": 2, "achieved_goal": 1, "desired_goal": 1}
    goals = {name: np.full((5, size), number) for number, (name, size) in enumerate(parts.items())}
    (one,) = read_demonstrations({"obs": goals, "acts": np.zeros(4, np.int64)})
    assert one.obs.tolist() == [[0.0, 0.0, 1.0, 2.0]] * 4


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"x": [1.0], "acts": [0]}, r"wanted are obs \(or observations.*found are \['acts', 'x'\]"),
        ({"obs": np.zeros((9, 2)), "acts": np.zeros(4)}, "4 actions, 9 observations"),
        ({"obs": np.zeros((4, 2)), "acts": np.zeros(4), "episode_ends": [2, 9]}, "do not cut its 4 steps"),
        ({"obs": np.array(["a"]), "acts": [0]}, "no array of numbers"),
        ({"obs": np.zeros((1, 2)), "acts": np.zeros(1)}, "give next_obs"),
        ({"obs": np.zeros((4, 2)), "acts": np.zeros(4), "next_obs": np.zeros((4, 3))}, "next_obs of"),
    ],
)
def test_arrays_that_do_not_add_up_are_refused(columns, complaint):
    with pytest.raises(DataError, match=complaint):
        read_demonstrations(columns)


# The native store


def test_a_data_set_with_states(tmp_path):
    rng = np.random.default_rng(0)

    def episode(steps, success, start):
        return Episode(
            frames={"base_camera": np.zeros((steps, 8, 8, 3), np.uint8)},
            labels=np.full(steps, float(success), np.float32),
            success=success,
            actions=rng.random((steps, 2)).astype(np.float32),
            states=rng.random((steps, 3)).astype(np.float32),
            initial_state=rng.random(3).astype(np.float32) if start else None,
            env_rewards=np.arange(steps, dtype=np.float32),
            terminated=np.arange(steps) == steps - 1,
            truncated=np.zeros(steps, np.bool_),
        )

    recorded = [episode(4, True, True), episode(5, False, True), episode(6, True, True)]
    with StoreWriter(tmp_path / "data") as writer:
        for each in recorded:
            writer.add(each)
    read = read_demonstrations(tmp_path / "data")
    assert [len(each) for each in read] == [4, 6]  # the failure is left out
    for one, whole in zip(read, (recorded[0], recorded[2]), strict=True):
        assert torch.equal(one.obs[0], torch.from_numpy(whole.initial_state))
        assert torch.equal(one.next_obs, torch.from_numpy(whole.states))
        assert torch.equal(one.obs[1:], one.next_obs[:-1]) and bool(one.terminated[-1])
        assert torch.equal(one.actions, torch.from_numpy(whole.actions))
        assert torch.equal(one.env_rewards, torch.from_numpy(whole.env_rewards))


# What does not fit the model


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        ({**DISCRETE, "obs_shape": 3}, "observations have 3 numbers, GAIL was made for 4"),
        (CONTINUOUS, "for discrete actions, these are real numbers"),
        ({**DISCRETE, "action_size": 5}, "discrete actions must lie in 0 to 1"),
    ],
)
def test_demonstrations_of_another_task_are_refused(shapes, complaint):
    model = create_reward_model({"type": "gail", **DISCRETE})
    with pytest.raises(DataError, match=complaint):
        model.load_expert_data(episodes(shapes))


def test_numbers_that_are_none_are_refused():
    broken = episodes()
    broken[1].obs[0, 0] = float("nan")
    with pytest.raises(DataError, match="not finite"):
        create_reward_model({"type": "gail", **DISCRETE}).load_expert_data(broken)


# Collecting


@pytest.mark.parametrize(
    ("env_id", "least"), [(FIXED_CARTPOLE, 199.0), (POINT_REACH, 30.0), ("Pendulum-v1", -300.0)]
)
def test_scripted_demonstrations(tmp_path, capsys, env_id, least):
    out = tmp_path / "demos.safetensors"
    count = 3 if env_id == "Pendulum-v1" else 10
    arguments = ["--env", env_id, "--episodes", str(count), "--out", str(out), "--json"]
    assert main(["collect-demos", *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)
    read = read_demonstrations(out)
    assert printed["episodes"] == len(read) == count
    assert (
        printed["mean_return"] == pytest.approx(float(returns_of(read).mean()))
        and printed["mean_return"] > least
    )


def test_noise_makes_them_worse(tmp_path):
    good, bad = (
        collect_demos(tmp_path / f"{noise}.safetensors", env_id=FIXED_CARTPOLE, noise=noise, episodes=4)
        for noise in (0.0, 1.0)
    )
    assert good["mean_return"] > 3.0 * bad["mean_return"]


def test_demonstrations_of_a_saved_policy(tmp_path):
    from guerdon.run import serial_pipeline_reward_model

    collect_demos(tmp_path / "first.safetensors", env_id=FIXED_CARTPOLE, episodes=2)
    tree = small(output_dir=str(tmp_path / "runs"))
    tree["reward_model"]["data_path"] = str(tmp_path / "first.safetensors")
    result = serial_pipeline_reward_model(tree, max_env_step=128)
    printed = collect_demos(tmp_path / "own.safetensors", policy=str(result.folder), episodes=3)
    (one, *_) = read_demonstrations(tmp_path / "own.safetensors")
    assert printed["env"] == FIXED_CARTPOLE
    assert (result.policy.act(one.obs.numpy(), deterministic=True) == one.actions.numpy()).all()
    with pytest.raises(DataError, match="the policy is for actions Discrete"):
        collect_demos(tmp_path / "x.safetensors", policy=str(result.folder), env_id=POINT_REACH)


def test_wrong_usage(tmp_path, capsys):
    out = str(tmp_path / "demos.safetensors")
    assert main(["collect-demos", "--env", "Acrobot-v1", "--out", out]) == 2
    assert "no scripted policy for 'Acrobot-v1'" in capsys.readouterr().err
    assert main(["collect-demos", "--out", out]) == 2
    assert main(["collect-demos", "--env", FIXED_CARTPOLE, "--out", str(tmp_path / "demos.pkl")]) == 2
    with pytest.raises(ConfigError, match="noise from 0 to 1"):
        collect_demos(Path(out), env_id=FIXED_CARTPOLE, noise=2.0)
