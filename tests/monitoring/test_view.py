"""`guerdon data view`: what is read back from the recording and the page is what the data hold."""

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from guerdon.cli.main import main
from guerdon.config import RewardModelConfig, load_config
from guerdon.core.errors import ConfigError
from guerdon.core.types import Episode
from guerdon.data.datasets.media import video_frames
from guerdon.data.formats import get_format
from guerdon.fit.score import score_path
from guerdon.models import Contract, build_model, save_checkpoint
from guerdon.monitoring.assess import load_manager
from guerdon.monitoring.report import write_report
from guerdon.monitoring.video import LIMIT
from guerdon.rewards.image.function import FunctionScorer
from guerdon.training.evaluation import FilmedEpisode
from guerdon.training.films import write_films
from guerdon.training.runs import check_settings

STEPS = (5, 70, 9)
"""Of the episodes; the second has more frames than are written at a time."""


def episode(number):
    rng = np.random.default_rng(number)
    steps = STEPS[number]
    return Episode(
        frames={
            "base_camera": rng.integers(0, 255, (steps, 24, 24, 3), dtype=np.uint8),
            "wrist/left": rng.integers(0, 255, (steps, 8, 12, 1), dtype=np.uint8),
        },
        labels=(np.arange(steps) >= steps - 2).astype(np.float32),
        success=True,
        actions=rng.normal(size=(steps, 3)).astype(np.float32),
        env_rewards=rng.normal(size=steps).astype(np.float32),
        source=f"file {number}",
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("view") / "data"
    with get_format("native").writer(path) as writer:
        for number in range(len(STEPS)):
            writer.add(episode(number))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    config = RewardModelConfig(arch="resnet10", width=8, image_size=(3, 24, 24), hidden_dim=8, num_frames=2)
    model = build_model(config).eval()
    contract = Contract.of(model, frame_sizes={"base_camera": (24, 24, 3)})
    return save_checkpoint(tmp_path_factory.mktemp("view") / "model", model, contract)


def read_recording(path):
    """Entity -> column -> its values in the order of the frames, as Rerun's own reader finds them."""
    from rerun.chunk import RrdReader

    rows = {}
    for chunk in RrdReader(path).stream():
        table = chunk.to_record_batch().to_pydict()
        if "frame" in table:
            rows.setdefault(chunk.entity_path, []).extend(
                dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)
            )
    found = {}
    for entity, each in rows.items():
        each.sort(key=lambda row: row["frame"])
        found[entity.lstrip("/")] = {name: [row[name] for row in each] for name in each[0]}
    return found


def numbers(column):
    return np.array(column["Scalars:scalars"], np.float32)


def joined(name):
    return np.concatenate([getattr(episode(number), name) for number in range(len(STEPS))])


def test_a_recording_holds_what_the_data_hold(data, checkpoint, tmp_path, capsys):
    out = tmp_path / "new" / "view.rrd"
    command = ["data", "view", data, "--rerun", "--checkpoint", checkpoint, "--out", out, "--json"]
    assert main(list(map(str, command))) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_episodes"], result["num_frames"], result["out"]) == (3, sum(STEPS), str(out))
    assert [file.name for file in out.parent.iterdir()] == ["view.rrd"]
    found = read_recording(out)
    assert found["label"]["frame"] == list(range(sum(STEPS)))
    assert found["label"]["episode"] == np.repeat(range(3), STEPS).tolist()
    assert found["label"]["step"] == np.concatenate([np.arange(steps) for steps in STEPS]).tolist()
    assert np.array_equal(numbers(found["label"])[:, 0], joined("labels"))
    assert np.array_equal(numbers(found["env_reward"])[:, 0], joined("env_rewards"))
    assert np.array_equal(numbers(found["actions"]), joined("actions"))
    manager = load_manager(checkpoint)
    scored = score_path(manager, data, tmp_path)
    assert np.allclose(numbers(found["prob_success"])[:, 0], scored.prob_success, atol=1e-6)
    assert scored.prob_success.std() > 0
    assert np.allclose(numbers(found["threshold"]), manager.threshold)
    assert found["episode"]["TextLog:text"][1] == ["episode 1: success: file 1"]
    assert found["episode"]["frame"] == [0, 5, 75]


def test_its_pictures_are_the_frames(data, tmp_path):
    from io import BytesIO

    from PIL import Image

    assert main(["data", "view", str(data), "--rerun", "--out", str(tmp_path / "a.rrd")]) == 0
    found = read_recording(tmp_path / "a.rrd")
    assert "prob_success" not in found and "threshold" not in found
    for entity, camera in (("camera/base_camera", "base_camera"), (r"camera/wrist\/left", "wrist/left")):
        blobs = [bytes(blob[0]) for blob in found[entity]["EncodedImage:blob"]]
        pictures = [np.asarray(Image.open(BytesIO(blob))) for blob in blobs]
        wanted = np.concatenate([episode(number).frames[camera] for number in range(3)])
        assert np.array_equal(np.stack(pictures).reshape(wanted.shape), wanted)


def test_some_episodes_and_a_notice(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["data", "view", str(data), "--rerun", "--episodes", "1", "--skip", "1"]
    assert main(arguments) == 0
    said = capsys.readouterr().err
    assert "only 1 episodes are shown" in said and "next: rerun view.rrd" in said
    found = read_recording(tmp_path / "view.rrd")
    assert np.array_equal(numbers(found["env_reward"])[:, 0], episode(1).env_rewards)
    assert main(["data", "view", str(data), "--rerun", "--episodes", "3"]) == 0
    assert "are shown" not in capsys.readouterr().err


def test_without_rerun_it_is_a_page(data, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "view", str(data), "--checkpoint", str(checkpoint)]) == 0
    assert capsys.readouterr().out == "3 episodes, 84 frames -> view.html\n"
    page = (tmp_path / "view.html").read_text()
    assert page.count("<section>") == 3 and "success: file 2" in page
    assert page.count("<figure") == (5 + 8 + 8) * 2
    assert page.count('class="success"') == 2 * (2 + 1 + 2)  # a step in 10 of the long episode is drawn
    assert page.count("learned probability") == 3 and page.count('class="limit"') == 3
    assert page.count(">env reward<") == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "view.png"], "--out must end in .html without --rerun, not view.png"),
        (["--rerun", "--out", "view.html"], "--out must end in .rrd, not view.html"),
        (["--episodes", "0"], "--episodes must be at least 1, not 0"),
        (["--skip", "3"], "no usable episode to show after the first 3"),
    ],
)
def test_what_cannot_be_shown_is_refused(data, arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "view", str(data), *arguments]) in (1, 2)
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rerun", None)
    assert main(["data", "view", str(data), "--rerun", "--out", str(tmp_path / "a.rrd")]) == 2
    assert "needs rerun-sdk: pip install 'guerdon[rerun]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"films in MP4 .* need PyAV: pip install 'guerdon\[video\]'"):
        check_settings(load_config("train", ["runner.video_format=mp4"]))


def test_rewards_that_are_not_finite_are_left_out_of_the_plots(tmp_path):
    shown = episode(0)
    rewards = np.array([np.inf, 1.0, np.nan, 3.0, -np.inf], np.float32)
    with get_format("native").writer(tmp_path / "data") as writer:
        writer.add(replace(shown, env_rewards=rewards))
    assert main(["data", "view", str(tmp_path / "data"), "--out", str(tmp_path / "a.html")]) == 0
    page = (tmp_path / "a.html").read_text()
    drawn = re.findall(r'class="curve" points="([^"]*)"', page)
    assert [len(points.split()) for points in drawn] == [2]  # of five rewards
    assert main(["data", "view", str(tmp_path / "data"), "--rerun", "--out", str(tmp_path / "a.rrd")]) == 0
    found = numbers(read_recording(tmp_path / "a.rrd")["env_reward"])[:, 0]
    assert np.array_equal(found, rewards, equal_nan=True)


# The films of a run


def film(steps=12):
    shown = episode(1)
    return FilmedEpisode(
        frames={"base_camera": shown.frames["base_camera"][:steps]},
        env_success=np.arange(steps) >= 9,
        env_rewards=shown.env_rewards[:steps],
        actions=shown.actions[:steps],
    )


class Classifier:
    """Scores frames by their brightness."""

    facts = SimpleNamespace(image_keys=("base_camera",), num_frames=1, threshold=0.5, gives_rewards=False)

    def score(self, frames):
        return SimpleNamespace(prob_success=brightness(frames["base_camera"]))


def brightness(frames):
    return (frames.mean(axis=(1, 2, 3)) / 255).astype(np.float32)


@pytest.mark.parametrize("format", ["gif", "mp4"])
def test_the_films_of_a_run_are_shown_with_their_values(tmp_path, format):
    write_films(tmp_path, [film(), film(7)], Classifier(), format)
    assert main(["data", "view", str(tmp_path), "--rerun", "--out", str(tmp_path / "a.rrd")]) == 0
    found = read_recording(tmp_path / "a.rrd")
    both = [film(), film(7)]
    wanted = np.concatenate([brightness(each.frames["base_camera"]) for each in both])
    assert np.allclose(numbers(found["prob_success"])[:, 0], wanted, atol=1e-6)
    fields = {"env_reward": "env_rewards", "env_success": "env_success", "actions": "actions"}
    for name, field in fields.items():
        expected = np.concatenate([getattr(each, field) for each in both]).astype(np.float32)
        assert np.allclose(numbers(found[name]).reshape(expected.shape), expected, atol=1e-6)
    assert found["camera/base_camera"]["frame"] == list(range(19))
    assert main(["data", "view", str(tmp_path), "--out", str(tmp_path / "a.html")]) == 0
    page = (tmp_path / "a.html").read_text()
    assert page.count("<section>") == 2 and "success: " in page and "failure: " in page


def test_a_film_in_mp4_has_every_frame(tmp_path):
    write_films(tmp_path, [film()], Classifier(), "mp4")
    (path,) = (tmp_path / "videos").glob("*.mp4")
    pictures = np.stack([picture for _, picture in video_frames(path)])
    assert pictures.shape == (12, 240 + 72, 240, 3)
    wanted = film().frames["base_camera"].repeat(10, axis=1).repeat(10, axis=2)
    error = np.abs(pictures[:9, 8:232, 8:232].astype(int) - wanted[:9, 8:232, 8:232])
    assert error.mean() < 12  # colours have half the resolution
    import av

    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        assert container.streams.video[0].average_rate == 10
    assert "data:video/mp4;base64," in write_report(tmp_path).read_text()


def test_films_of_the_run_that_is_continued_go(tmp_path):
    write_films(tmp_path, [film(), film(), film()], Classifier(), "gif")
    own = tmp_path / "videos" / "mine.gif"
    own.write_bytes(b"GIF89a")
    write_films(tmp_path, [film(7)], Classifier(), "mp4")
    left = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert left == ["eval_0.json", "eval_0.mp4", "mine.gif"]
    write_films(tmp_path, [], Classifier(), "gif")  # nothing was filmed: the last films stay
    assert (tmp_path / "videos" / "eval_0.mp4").is_file()


def test_films_of_a_reward_function_show_rewards(tmp_path):
    def pays(frames):
        return 30.0 * brightness(frames) - 20.0

    write_films(tmp_path, [film()], FunctionScorer(pays))
    about = json.loads((tmp_path / "videos" / "eval_0.json").read_text())
    assert "prob_success" not in about and about["threshold"] is None
    assert np.allclose(about["learned_reward"], pays(film().frames["base_camera"]))
    from guerdon.monitoring.films import film_frames

    panels = np.stack(list(film_frames(tmp_path / "videos" / "eval_0.gif", None, 12)))[:, 240:].astype(int)
    assert not (np.abs(panels - LIMIT).max(axis=-1) < 30).any()  # no threshold
    curve = (np.abs(panels[-1] - (106, 162, 255)).max(axis=-1) < 30).nonzero()[0]
    assert curve.min() < 12 and curve.max() > 55  # from the lowest to the highest reward
    words = write_report(tmp_path).read_text()
    assert "Below each frame: the learned reward" in words and "the learned probability" not in words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"env_reward": [1.0]}, "different numbers of steps"),
        ({"prob_success": "much"}, "prob_success must hold numbers"),
        ({"actions": [[1], [2, 3]]}, "actions must hold numbers"),
        ({"threshold": "high"}, "threshold must hold numbers"),
        ({"threshold": 10**400}, "threshold must hold numbers"),
        ({"picture": [{}, 2]}, "picture must be"),
        ({"picture": [-5, 2]}, "picture must be"),
        ({"picture": [5]}, "picture must be"),
        (None, "cannot be read as JSON"),
    ],
)
def test_damaged_values_of_a_film_are_refused(tmp_path, change, words, capsys):
    write_films(tmp_path, [film()], Classifier())
    file = tmp_path / "videos" / "eval_0.json"
    file.write_text("{" if change is None else json.dumps({**json.loads(file.read_text()), **change}))
    assert main(["data", "view", str(tmp_path), "--out", str(tmp_path / "a.html")]) == 1
    assert words in capsys.readouterr().err


def test_damaged_and_older_films(tmp_path, capsys):
    write_films(tmp_path, [film()], Classifier())
    file = tmp_path / "videos" / "eval_0.gif"
    file.with_suffix(".json").unlink()
    assert main(["data", "view", str(tmp_path), "--rerun", "--out", str(tmp_path / "a.rrd")]) == 0
    assert "has no values beside it" in capsys.readouterr().err
    assert read_recording(tmp_path / "a.rrd")["camera/film"]["frame"] == list(range(12))
    file.write_bytes(file.read_bytes()[:40])
    assert main(["data", "view", str(tmp_path), "--out", str(tmp_path / "a.html")]) == 1
    assert "is not a readable film" in capsys.readouterr().err
