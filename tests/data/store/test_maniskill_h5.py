"""ManiSkill's recorded trajectories, from files that its own recorder writes."""

import shutil

import h5py
import numpy as np
import pytest

from guerdon.agents.networks import ObsSpec
from guerdon.agents.recorded import open_demonstrations
from guerdon.core.errors import DataError
from guerdon.core.types import Episode, Fault
from guerdon.data.formats import detect_format, get_format
from guerdon.data.store import EpisodeStore
from guerdon.envs.maniskill.vulkan import choose_driver

STEPS = 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """obs_mode -> a folder with two episodes of PickCube, and what the environment returned for them."""
    choose_driver()
    import gymnasium as gym
    import mani_skill.envs  # noqa: F401
    from mani_skill.utils.wrappers.record import RecordEpisode

    found = {}
    for mode in ("state", "rgb"):
        folder = tmp_path_factory.mktemp(mode)
        env = gym.make(
            "PickCube-v1", num_envs=1, obs_mode=mode, control_mode="pd_ee_delta_pos", sim_backend="cpu",
            render_backend="cpu", sensor_configs={"width": 32, "height": 24}, max_episode_steps=STEPS,
        )  # fmt: skip
        env = RecordEpisode(env, str(folder), save_video=False, trajectory_name="trajectory")
        returned = []
        rng = np.random.default_rng(0)
        for seed in (11, 12):
            first, _ = env.reset(seed=seed)
            steps = []
            for _ in range(STEPS):
                action = rng.uniform(-1, 1, 4).astype(np.float32)
                obs, reward, _, _, info = env.step(action)
                steps.append((action, obs, float(reward[0]), bool(info["success"][0])))
            returned.append((first, steps))
        env.close()
        found[mode] = (folder, returned)
    return found


def read(path):
    items = list(detect_format(path).read(path))
    return [i for i in items if isinstance(i, Episode)], [i for i in items if isinstance(i, Fault)]


@pytest.mark.sim
def test_states_actions_and_seeds(recorded):
    folder, returned = recorded["state"]
    assert detect_format(folder).name == detect_format(folder / "trajectory.h5").name == "maniskill-h5"
    episodes, faults = read(folder)
    assert not faults and [episode.seed for episode in episodes] == [11, 12]
    for episode, (first, steps) in zip(episodes, returned, strict=True):
        np.testing.assert_array_equal(episode.initial_state, first[0].numpy())
        np.testing.assert_array_equal(episode.states, np.concatenate([obs.numpy() for _, obs, _, _ in steps]))
        np.testing.assert_array_equal(episode.actions, np.stack([action for action, _, _, _ in steps]))
        np.testing.assert_allclose(episode.env_rewards, [reward for _, _, reward, _ in steps], atol=1e-6)
        assert episode.labels.tolist() == [float(success) for _, _, _, success in steps]
        assert episode.truncated.tolist() == [False] * (STEPS - 1) + [True] and episode.complete
        assert episode.frames["no_camera"].shape == (STEPS, 1, 1, 3)


@pytest.mark.sim
def test_images_and_what_stands_beside_them(recorded, tmp_path):
    folder, returned = recorded["rgb"]
    episodes, faults = read(folder)
    assert not faults and len(episodes) == 2
    for episode, (first, steps) in zip(episodes, returned, strict=True):
        shown = np.concatenate([obs["sensor_data"]["base_camera"]["rgb"].numpy() for _, obs, _, _ in steps])
        assert shown.shape == (STEPS, 24, 32, 3) and shown.std() > 5
        np.testing.assert_array_equal(episode.frames["base_camera"], shown)
        start = [first["agent"]["qpos"], first["agent"]["qvel"], first["extra"]["is_grasped"][:, None]]
        start += [first["extra"]["tcp_pose"], first["extra"]["goal_pos"]]
        np.testing.assert_allclose(episode.initial_state, np.concatenate([v.numpy() for v in start], 1)[0])
        assert episode.is_grasped.tolist() == [False] * STEPS
    with get_format("native").writer(tmp_path / "store") as writer:
        writer.add_many(episodes)
    assert EpisodeStore(tmp_path / "store").cameras == {"base_camera": (24, 32, 3)}


@pytest.mark.sim
def test_they_are_demonstrations(recorded, tmp_path):
    """As recorded, but with success on the last two steps."""
    shutil.copytree(recorded["state"][0], tmp_path / "demos")
    with h5py.File(tmp_path / "demos" / "trajectory.h5", "r+") as file:
        file["traj_0/success"][:] = [False, False, True, True]
    episodes, _ = read(tmp_path / "demos")
    assert [episode.success for episode in episodes] == [True, False]
    assert episodes[0].labels.tolist() == [0, 0, 1, 1]
    with open_demonstrations(tmp_path / "demos", ObsSpec(state_size=42, images=())) as shown:
        assert len(shown) == 1 and len(shown[0]) == STEPS
        np.testing.assert_array_equal(shown[0].obs["state"][0], episodes[0].initial_state)
        np.testing.assert_array_equal(shown[0].next_obs["state"], episodes[0].states)


@pytest.mark.sim
def test_what_is_damaged_is_named_and_the_rest_is_read(recorded, tmp_path):
    shutil.copytree(recorded["state"][0], tmp_path / "some")
    with h5py.File(tmp_path / "some" / "trajectory.h5", "r+") as file:
        del file["traj_0/obs"]
        file["traj_0/obs"] = np.zeros((STEPS, 42), np.float32)
    (tmp_path / "some" / "broken.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + b"rubbish")
    (tmp_path / "some" / "trajectory.json").write_text("{")
    episodes, faults = read(tmp_path / "some")
    assert len(episodes) == 1 and episodes[0].seed is None
    printed = {fault.path.rpartition("/")[2]: fault.reason for fault in faults}
    assert printed.keys() == {"broken.h5", "trajectory.json", "trajectory.h5:traj_0"}
    assert "4 states for 5 frames" in printed["trajectory.h5:traj_0"] and "JSON" in printed["trajectory.json"]


def test_nothing_outside_the_file_is_read(tmp_path):
    np.arange(8, dtype=np.float32).tofile(tmp_path / "secret.bin")
    with h5py.File(tmp_path / "other.hdf", "w") as file:
        file["actions"] = np.zeros((2, 4), np.float32)
    with h5py.File(tmp_path / "trajectory.h5", "w") as file:
        for number in range(3):
            file.create_group(f"traj_{number}")
        file["traj_0/actions"] = h5py.ExternalLink("other.hdf", "actions")
        outside = [(str(tmp_path / "secret.bin"), 0, 32)]
        file["traj_1"].create_dataset("actions", (2, 4), np.float32, external=outside)
        layout = h5py.VirtualLayout((2, 4), np.float32)
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.hdf"), "actions", (2, 4))
        file["traj_2"].create_virtual_dataset("actions", layout)
    episodes, faults = read(tmp_path / "trajectory.h5")
    assert not episodes
    reasons = [fault.reason for fault in faults]
    assert "link to somewhere else" in reasons[0]
    assert all("kept in another file" in reason for reason in reasons[1:]) and len(reasons) == 3


def test_other_hdf5_files_and_writing(tmp_path):
    with h5py.File(tmp_path / "weights.h5", "w") as file:
        file["layer"] = np.zeros(3)
    _, faults = read(tmp_path)
    assert "no ManiSkill trajectory" in faults[0].reason
    with pytest.raises(DataError, match="can be read but not written"):
        get_format("maniskill-h5").writer(tmp_path)
