"""Recording a robot: labels are true, every episode is on disk before the next, nothing is lost."""

import pickle
import shutil

import numpy as np
import pytest

from guerdon.agents.networks import ObsSpec
from guerdon.agents.recorded import open_demonstrations
from guerdon.config import CollectConfig
from guerdon.core.errors import ConfigError, DataError, RobotError
from guerdon.core.types import control_mode_of
from guerdon.data.collect.robot import RobotCollector, collect_robot
from guerdon.data.datasets.cleaning import process
from guerdon.data.formats.realworld_pkl import RealworldPklWriter, RecordedEpisode, read_recorded
from guerdon.data.store import EpisodeStore
from guerdon.data.summary import inspect
from tests.robot.conftest import HOLD, SIZE, section


def settings(folder, **more):
    return CollectConfig(save_dir=str(folder), format="realworld-pkl", **more)


class Witness(RobotCollector):
    """Notes the truth and what is on disk whenever an episode has ended."""

    server = None

    def _count(self, episode):
        super()._count(episode)
        if self.server is not None:
            on_disk = [item.episode for item in read_recorded(self.path)]
            truth = self.server.world.truth()["inserted"]
            self.notes = [*getattr(self, "notes", []), (episode, truth, len(on_disk))]


def test_labels_are_the_truth_and_each_episode_is_safe_before_the_next(robot, tmp_path):
    cfg = section(robot, params={"failure_rate": 0.4})
    collector = Witness(cfg, settings(tmp_path / "logs"), 6, 3)
    collector.server = robot
    robot.world.set_box(*collector.robot.box)
    assert collector.run() == "targets met"
    assert [number for _, _, number in collector.notes] == [1, 2, 3, 4, 5, 6]
    said = [episode.success for episode, _, _ in collector.notes]
    assert said == [truth for _, truth, _ in collector.notes]
    assert set(said) == {True, False}
    assert collector.progress() == f"success {sum(said)} fail {6 - sum(said)}, 6/6 episodes"
    assert [item.name for item in (tmp_path / "logs").iterdir() if item.is_file()] == ["data.pkl"]
    found = list(read_recorded(tmp_path / "logs"))
    for item, (episode, _, _) in zip(found, collector.notes, strict=True):
        assert isinstance(item, RecordedEpisode)
        np.testing.assert_array_equal(item.episode.frames["wrist_camera"], episode.frames["wrist_camera"])
        assert item.episode.frames["front_camera"].shape[1:] == (SIZE, SIZE, 3)
        assert item.intervened.all()
        assert item.hold_steps == HOLD
        assert control_mode_of(item.episode.source) == "ee_xyz_10mm_50mrad_10hz"
        if item.episode.success:
            assert item.episode.labels[-HOLD:].tolist() == [1.0] * HOLD
            np.testing.assert_array_equal(item.at_target, item.episode.labels > 0.5)
    assert robot.world.record.commands > 100
    assert robot.world.record.outside == 0


class Killed(RobotCollector):
    """A killed process makes no file of the parts."""

    def close(self):
        self.env.close()


def test_a_killed_recording_is_whole_and_goes_on(robot, tmp_path):
    folder = tmp_path / "logs"
    Killed(section(robot), settings(folder), 2, 0).run()
    assert not (folder / "data.pkl").exists()
    assert inspect(folder).num_episodes == 2  # readers see what is there
    with pytest.raises(ConfigError, match="--resume"):
        collect_robot(section(robot), settings(folder), num_episodes=3)
    result = collect_robot(section(robot), settings(folder, resume=True), num_episodes=3)
    assert (result.num_success, result.complete) == (3, True)
    assert len(list(folder.iterdir())) == 1
    with (folder / "data.pkl").open("rb") as file:
        assert sum(bool(step["terminations"]) for step in pickle.load(file)) == 3
    starts = np.array([item.episode.initial_state[:2] for item in read_recorded(folder)])  # in 5 cm
    gaps = np.abs(starts[:, None] - starts[None]).max(axis=-1) + np.eye(3)
    assert gaps.min() > 0.02  # going on does not repeat what was there


def test_parts_that_are_in_the_file_already_are_not_read_twice(robot, tmp_path):
    parts = tmp_path / "data.pkl.parts"
    Killed(section(robot), settings(tmp_path), 2, 0).run()
    shutil.copytree(parts, tmp_path / "copy")
    RealworldPklWriter(tmp_path).close()
    assert (tmp_path / "data.pkl").exists()
    assert not parts.exists()
    (tmp_path / "copy").rename(parts)  # as if it was killed before they were removed
    assert len(list(parts.iterdir())) == 2
    assert len(list(read_recorded(tmp_path))) == 2


def test_an_episode_that_breaks_off_is_kept_apart_and_recording_goes_on(robot, tmp_path, monkeypatch):
    collector = RobotCollector(section(robot), settings(tmp_path / "logs"), 2, 0)
    step, count = collector.env.step, []

    def fails_once(action):
        count.append(1)
        if len(count) == 8:
            collector.env.env.stop()
            raise RobotError("the controller is gone")
        return step(action)

    monkeypatch.setattr(collector.env, "step", fails_once)
    assert collector.run() == "targets met"
    assert collector.counts == {"success": 2, "failure": 0, "unfinished": 1}
    first, *others = (item.episode for item in read_recorded(tmp_path / "logs"))
    assert (first.complete, first.num_frames) == (False, 7)
    assert all(episode.complete and episode.success for episode in others)


def test_faults_lose_nothing_and_mislabel_nothing(robot, tmp_path):
    robot.world.set_faults({"drop_rate": 0.05, "latency_rate": 0.03, "controller_error_rate": 0.01})
    collector = Witness(section(robot, params={"failure_rate": 0.3}), settings(tmp_path / "logs"), 5, 1)
    collector.server = robot
    robot.world.set_box(*collector.robot.box)
    robot.world.freeze_camera("wrist_camera", 1.0)
    collector.run()
    record = robot.world.record
    assert record.faults["drop"] > 5
    assert record.faults["latency"] > 3
    assert record.outside == 0
    assert collector.counts["success"] + collector.counts["failure"] == 5
    assert all(episode.success == truth for episode, truth, _ in collector.notes if episode.complete)
    assert len(list(read_recorded(tmp_path / "logs"))) == sum(collector.counts.values())


# Bad input


def test_a_robot_that_is_not_there_is_named_before_anything_is_written(tmp_path, robot):
    robot.stop()
    with pytest.raises(RobotError, match=r"127\.0\.0\.1"):
        collect_robot(section(robot, retries=0), settings(tmp_path / "logs"), num_episodes=1)
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reset_ee_pose": [0.9, 0.0, 0.1, -3.14, 0.0, 0.0]}, "outside the safety box"),
        ({"robot_ip": "ROBOT_IP"}, "still ROBOT_IP"),
        ({"succes_hold_steps": 3}, "success_hold_steps"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(robot, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        collect_robot(section(robot, **change), settings(tmp_path / "logs"), num_episodes=1)
    assert robot.world.record.commands == 0


def test_nobody_at_the_controls_is_an_error(robot, tmp_path):
    with pytest.raises(ConfigError, match="nobody drives"):
        collect_robot(section(robot, operator="none"), settings(tmp_path / "logs"), num_episodes=1)


def test_a_recording_without_success_and_one_of_another_robot_are_refused(robot, tmp_path):
    cfg = section(robot, params={"failure_rate": 1.0})
    collect_robot(cfg, settings(tmp_path / "failed"), num_episodes=2)
    with pytest.raises(DataError, match="no success among them"):
        process(tmp_path / "failed" / "data.pkl", tmp_path / "out")
    collect_robot(section(robot), settings(tmp_path / "logs"), num_episodes=1)
    cameras = tuple((name, (SIZE, SIZE, 3)) for name in ("front_camera", "wrist_camera"))
    spec = ObsSpec(state_size=19, images=cameras)
    with open_demonstrations(tmp_path / "logs", spec, "ee_xyz_10mm_50mrad_10hz") as shown:
        assert len(shown) == 1
    other = "ee_xyzrxryrz_10mm_50mrad_10hz"
    with (
        pytest.raises(DataError, match="move the robot differently"),
        open_demonstrations(tmp_path / "logs", spec, other),
    ):
        pass


def test_processing_a_recording(robot, tmp_path):
    collect_robot(section(robot, params={"failure_rate": 0.3}), settings(tmp_path), num_episodes=5, seed=3)
    report = process(tmp_path / "data.pkl", tmp_path / "collected_data")
    store = EpisodeStore(tmp_path / "collected_data")
    assert (report.num_episodes, store.num_episodes) == (5, 5)
    assert report.audit.ok
    assert set(store.episode_column("split")) == {"train", "val"}
    assert 0 < report.num_positive_frames == int((store.labels > 0.5).sum()) < report.num_frames
