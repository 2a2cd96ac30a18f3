"""The audit finds what is wrong with a data set, and nothing where nothing is."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from guerdon.config import CollectConfig, EnvConfig, FitConfig, FitDataConfig, RewardModelConfig
from guerdon.core.errors import DataError
from guerdon.core.types import Episode
from guerdon.data.collect.run import collect
from guerdon.data.datasets.audit import audit
from guerdon.data.datasets.probe import probe
from guerdon.data.store import StoreWriter
from guerdon.envs.tabletop import render as tabletop_render
from guerdon.fit import fit_reward_model


def frames_of(rng, steps=20, size=32):
    """A square moving from a random start over a fixed background."""
    background = np.random.default_rng(7).integers(60, 120, (size, size, 3), dtype=np.uint8)
    frames = np.repeat(background[None], steps, axis=0)
    start, end = rng.uniform(0, size - 9, (2, 2))
    for step in range(steps):
        row, column = (start + (end - start) * step / steps).astype(int)
        frames[step, row : row + 8, column : column + 8] = 240
    return frames


def make(seed=0, success=False, **changes):
    rng = np.random.default_rng(seed)
    labels = np.zeros(20, np.float32)
    labels[15:] = success
    values = {
        "frames": {"base_camera": frames_of(rng)},
        "labels": labels,
        "success": success,
        "actions": rng.uniform(-1, 1, (20, 4)).astype(np.float32),
        "source": f"seed-{seed}",
    }
    return Episode(**{**values, **changes})


def report_of(tmp_path, *extra, healthy=10):
    episodes = [make(seed, success=seed % 2 == 0) for seed in range(healthy)]
    with StoreWriter(tmp_path / "store") as writer:
        writer.add_many([*episodes, *extra])
    return audit(tmp_path / "store")


def found(report, level):
    return [(item.check, item.message, item.examples) for item in report.findings if item.level == level]


def test_a_healthy_data_set_has_no_errors(tmp_path):
    report = report_of(tmp_path)
    assert report.ok
    assert found(report, "error") == found(report, "warning") == []
    assert "5 success and 5 failure episodes, 12.5% of 200 frames positive" in found(report, "info")[0][1]


def leak(episode):
    """Replace the final frame by the first one of another episode, as a careless auto-reset does."""
    frames = episode.frames["base_camera"].copy()
    frames[-1] = frames[0]
    frames[1:-1] = frames[10]  # what moved had come to rest far from the start
    return {"base_camera": frames}


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        (
            {"success": True, "labels": np.zeros(20, np.float32)},
            "labels",
            "counted as success, but no frame is labelled so",
        ),
        ({"labels": np.ones(20, np.float32)}, "labels", "counted as failure, but some frames"),
        ({"frames": {"base_camera": np.zeros((20, 32, 32, 3), np.uint8)}}, "camera", "every frame is black"),
        ({"frames": {"base_camera": np.full((20, 32, 32, 3), 9, np.uint8)}}, "camera", "is one colour"),
        ({"actions": np.full((20, 4), np.nan, np.float32)}, "nan", "actions hold NaN"),
        ({"env_rewards": np.full(20, np.inf, np.float32)}, "nan", "env_rewards hold NaN or infinite"),
        ({"frames": leak(make(50))}, "alignment", "seems to show the next episode"),
    ],
)
def test_an_error_names_check_and_episode(tmp_path, changes, check, text):
    report = report_of(tmp_path, make(50, **changes))
    assert not report.ok
    errors = found(report, "error")
    assert [item[0] for item in errors] == [check]
    assert text in errors[0][1]
    assert errors[0][2] == ("episode 10 (seed-50)",)


def test_a_frozen_camera_is_a_warning(tmp_path):
    frames = make(50).frames["base_camera"].copy()
    frames[4:] = frames[4]
    report = report_of(tmp_path, make(50, frames={"base_camera": frames}))
    assert report.ok
    assert "frozen while the robot moves" in found(report, "warning")[0][1]


def test_standing_still_is_not_a_frozen_camera(tmp_path):
    frames = make(50).frames["base_camera"].copy()
    frames[4:] = frames[4]
    still = make(50, frames={"base_camera": frames}, actions=np.zeros((20, 4), np.float32))
    assert found(report_of(tmp_path, still), "warning") == []


def test_near_duplicates_are_an_error_only_across_splits(tmp_path):
    noisy = np.clip(
        make(3).frames["base_camera"].astype(int) + np.random.default_rng(0).integers(-3, 4, (20, 32, 32, 3)),
        0,
        255,
    ).astype(np.uint8)
    report = report_of(tmp_path / "same", make(3, frames={"base_camera": noisy}, source="copy"))
    assert report.ok
    assert report.num_duplicate_pairs == 1
    report = report_of(
        tmp_path / "across", make(3, frames={"base_camera": noisy}, source="copy", split="val")
    )
    assert not report.ok
    assert found(report, "error")[0][2] == ("episode 3 (seed-3) ~ episode 10 (copy)",)


def test_no_success_at_all_is_an_error(tmp_path):
    with StoreWriter(tmp_path / "store") as writer:
        writer.add_many([make(seed) for seed in range(5)])
    report = audit(tmp_path / "store")
    assert "nothing to learn success from: 0 success and 5 failure" in found(report, "error")[0][1]


def test_no_failure_at_all_is_an_error(tmp_path):
    with StoreWriter(tmp_path / "store") as writer:
        writer.add_many([make(seed, success=True, labels=np.ones(20, np.float32)) for seed in range(5)])
    assert "nothing to learn failure from" in found(audit(tmp_path / "store"), "error")[0][1]


def test_changed_bytes_are_noticed(tmp_path):
    assert report_of(tmp_path).ok
    file = tmp_path / "store" / "shards" / "s000000" / "frames-00.u8"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    errors = found(audit(tmp_path / "store"), "error")
    assert [item[0] for item in errors] == ["hash"]


def test_plain_containers_for_json(tmp_path):
    plain = report_of(tmp_path, make(50, labels=np.ones(20, np.float32))).to_dict()
    assert plain["ok"] is False
    assert plain["findings"][0]["level"] == "error"
    assert plain["num_episodes"] == 11


# Whether the camera shows what success is about


def away(canvas, rows, camera):
    """What a camera draws over the empty table when robot, cube and goal are out of its picture: nothing."""


def collected(folder, **init_params):
    env = EnvConfig(num_envs=8, init_params={"image_size": [32, 32], **init_params})
    settings = CollectConfig(save_dir=str(folder), policy="scripted", policy_noise=0.5)
    assert collect(env, replace(settings, target_success=12, target_failure=12), seed=0).complete
    return folder


def views(report):
    return [(item.level, item.message) for item in report.findings if item.check == "view"]


@pytest.mark.parametrize("randomization", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_camera_that_looks_away_is_noticed_and_a_good_one_is_not(
    tmp_path, monkeypatch, caplog, randomization
):
    good = collected(tmp_path / "good", domain_randomization=randomization, status_lamp=False)
    assert views(audit(good)) == []
    monkeypatch.setattr(tabletop_render, "_draw_base_view", away)
    bad = collected(tmp_path / "bad", domain_randomization=randomization, status_lamp=False)
    ((level, message),) = views(audit(bad))
    assert level == "error"
    assert (
        "cannot be told apart by camera 'base_camera'" in message
        and "Does it show the robot and the goal" in message
    )
    model = RewardModelConfig(arch="resnet10", width=8, image_size=(3, 32, 32), hidden_dim=8)
    for data, warned in ((good, False), (bad, True)):
        caplog.clear()
        cfg = FitConfig(epochs=1, data=FitDataConfig(path=str(data)))
        # Pictures that are all the same are duplicates of each other, and none is left to hold out.
        refused = (
            pytest.raises(DataError, match="val split") if warned and not randomization else nullcontext()
        )
        with refused:
            fit_reward_model(model, cfg, folder=tmp_path / f"fit_{data.name}", tensorboard=False)
        assert ("cannot be told apart by camera 'base_camera'" in caplog.text) is warned


def test_one_camera_that_shows_it_is_enough(tmp_path):
    episodes = []
    for seed in range(12):
        episode = make(seed, success=seed % 2 == 0)
        dull = np.full((20, 32, 32, 3), 90 + seed, np.uint8)  # the light differs, and nothing moves
        dull += np.random.default_rng(seed).integers(0, 9, dull.shape, dtype=np.uint8)
        episodes.append(replace(episode, frames={**episode.frames, "side": dull}))
    with StoreWriter(tmp_path / "store") as writer:
        writer.add_many(episodes)
    ((level, message),) = views(audit(tmp_path / "store"))
    assert level == "warning" and "camera 'side'" in message


def test_what_a_probe_can_say():
    rng = np.random.default_rng(0)
    labels = [np.arange(8) >= (4 if number % 2 else 8) for number in range(100)]
    noise = [rng.uniform(0, 255, (8, 16)).astype(np.float32) for _ in labels]
    chance, seen = (
        probe(noise, labels),
        probe([x + 200 * y[:, None] for x, y in zip(noise, labels, strict=True)], labels),
    )
    assert not chance.blind and chance.auc <= 0.55 < 0.95 < seen.auc and not seen.blind
    assert probe(noise[:60], labels[:60]).auc is None  # thirty of each kind do not allow that much
    assert probe(noise[:11], labels[:11]) is None
    finals = [np.full((1, 16), 90.0, np.float32)] * 12  # one frame of each episode, and all the same
    assert probe(finals, [each[-1:] for each in labels[:12]]).blind
    assert not probe([each[:1] for each in noise[:12]], [each[-1:] for each in labels[:12]]).blind


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.sim
def test_a_camera_of_the_simulator_that_looks_away(tmp_path, turned):
    """ManiSkill's PickCube, the final frames of episodes alone, so that it takes seconds."""
    view = {"camera_eye": [2.0, 2.0, 0.5], "camera_target": [4.0, 4.0, 0.5]} if turned else {}
    robot = {"control_mode": "pd_ee_delta_pos", "render_mode": "rgb_array"}
    env = EnvConfig(
        env_type="maniskill",
        id="PickCube-v1",
        num_envs=4,
        reward_render_mode="on_demand",
        init_params={**robot, **view},
    )
    settings = CollectConfig(save_dir=str(tmp_path / "data"), policy="scripted", policy_noise=0.6)
    assert collect(env, replace(settings, target_success=6, target_failure=6), seed=0).complete
    found = views(audit(tmp_path / "data"))
    if not turned:
        assert found == []
        return
    ((level, message),) = found
    assert level == "error" and "cannot be told apart by camera 'base_camera'" in message
