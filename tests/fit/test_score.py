"""Scoring pictures, videos and arrays: the same probabilities as for a data set, without labels and NaN."""

import json
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from guerdon.cli.main import main
from guerdon.core.errors import ConfigError, DataError
from guerdon.data.datasets import media
from guerdon.data.datasets.media import find_clips, fitted
from guerdon.data.files import videos
from guerdon.fit.score import predict, score_path
from guerdon.models import Contract, ResNetRewardModel, save_checkpoint
from guerdon.monitoring.assess import load_manager, summarize_scores
from tests.verdicts import CAMERA, SIZE, make_case

COUNT = 12


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("case"), "temperature")


@pytest.fixture(scope="module")
def manager(case):
    return load_manager(case.checkpoint)


def write_pictures(folder, frames):
    folder.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"frame{number}.png")  # frame10 comes before frame2 as text
    return folder


def write_video(path, frames):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1" if path.suffix == ".mkv" else "mpeg4", rate=10)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "bgr0" if path.suffix == ".mkv" else "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_pictures_come_in_natural_order_and_score_as_arrays_do(case, manager, tmp_path):
    frames = case.frames[:COUNT]
    wanted = manager.score({CAMERA: frames}).prob_success
    folder = write_pictures(tmp_path / "clip", frames)
    (folder / "notes.txt").write_text("not a picture")
    (folder / "._frame0.png").write_bytes(b"what macOS leaves")
    np.testing.assert_allclose(predict(manager, folder), wanted, rtol=1e-5)
    np.testing.assert_allclose(predict(manager, str(folder / "frame3.png")), wanted[3:4], rtol=1e-5)
    Image.fromarray(frames[0]).save(tmp_path / "one.jpeg", quality=95)
    assert predict(manager, tmp_path / "one.jpeg").shape == (1,)


def test_arrays_in_every_layout(case, manager):
    frames = case.frames[:COUNT]
    wanted = manager.score({CAMERA: frames}).prob_success
    ways = (
        frames,
        {CAMERA: frames},
        torch.from_numpy(frames),
        frames.transpose(0, 3, 1, 2),
        frames.astype(np.float32) / 255,
    )
    for given in ways:
        np.testing.assert_allclose(predict(manager, given), wanted, rtol=1e-4)
    np.testing.assert_allclose(predict(manager, frames[0]), wanted[:1], rtol=1e-4)
    np.testing.assert_allclose(predict(manager, case.data), predict(manager, case.frames), rtol=1e-4)
    with pytest.raises(DataError, match="no image of camera"):
        predict(manager, {"wrist": frames})


def test_a_lossless_video_scores_as_its_frames(case, manager, tmp_path, monkeypatch):
    frames = case.frames[:COUNT]
    video = write_video(tmp_path / "clip.mkv", frames)
    wanted = manager.score({CAMERA: frames}).prob_success
    np.testing.assert_allclose(predict(manager, video), wanted, rtol=1e-5)
    monkeypatch.setattr(media, "MAX_BATCH_BYTES", 5 * frames[0].nbytes)  # batches of 5, 5 and 2
    (clip,) = find_clips(video, (CAMERA,))
    assert [len(batch[CAMERA]) for batch in clip.batches({}, 256)] == [5, 5, 2]
    np.testing.assert_allclose(predict(manager, video), wanted, rtol=1e-5)


def test_the_command_scores_a_folder_of_videos_without_nan(case, tmp_path, capsys):
    clips = tmp_path / "clips"
    clips.mkdir()
    for name, frames in (("b.mp4", case.frames[:5]), ("a.mp4", case.frames[5:8])):
        write_video(clips / name, frames)
    out = tmp_path / "scores.json"
    command = ["reward", "score", str(clips), "--checkpoint", str(case.checkpoint), "--out", str(out)]
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr().out
    reported = json.loads(printed)
    assert "NaN" not in printed and "null" not in printed.replace('"out": null', "")
    assert reported["frames"] == 8 and reported["episodes"] == 2 and "metrics" not in reported
    rows = json.loads(out.read_text())
    assert [row["source"].endswith("a.mp4") for row in rows] == [True] * 3 + [False] * 5
    assert [row["step"] for row in rows] == [0, 1, 2, 0, 1, 2, 3, 4] and "label" not in rows[0]
    assert all(0.0 < row["prob_success"] < 1.0 for row in rows)
    assert main(command) == 0
    assert "AUC" not in capsys.readouterr().out


def test_a_threshold_of_the_command_wins(case, capsys):
    command = ["reward", "score", str(case.data), "--checkpoint", str(case.checkpoint), "--json"]
    fires = []
    for more in ([], ["--threshold", "0.01"], ["--threshold", "0.99"]):
        assert main([*command, *more]) == 0
        reported = json.loads(capsys.readouterr().out)
        fires.append((reported["threshold"], reported["fires"]))
    assert fires[0][0] == case.threshold and fires[1][0] == 0.01
    assert fires[1][1] > fires[0][1] > fires[2][1]
    assert main([*command, "--threshold", "1.5"]) == 2


def test_larger_frames_are_resized_and_others_refused(case, manager, tmp_path, caplog):
    large = np.stack([np.asarray(Image.fromarray(each).resize((96, 96))) for each in case.frames[:3]])
    folder = write_pictures(tmp_path / "large", large)
    with caplog.at_level("INFO"):
        assert predict(manager, folder).shape == (3,)
    assert f"96x96 pixels are resized to {SIZE}x{SIZE}" in caplog.text
    write_pictures(tmp_path / "wide", large[:, :48])
    with pytest.raises(DataError, match="would distort"):
        predict(manager, tmp_path / "wide")
    assert fitted(large[0, ..., 0], (SIZE, SIZE, 3), "grey").shape == (SIZE, SIZE, 3)
    assert fitted(large[0], (SIZE, SIZE, 1), "colour").shape == (SIZE, SIZE, 1)


def test_what_cannot_be_scored_is_named(case, manager, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="does not exist"):
        predict(manager, tmp_path / "nothing.mp4")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"pictures and videos: \.png"):
        predict(manager, tmp_path / "a.txt")
    for name in ("torn.mp4", "torn.png"):
        (tmp_path / name).write_bytes(b"#EXTM3U\nnothing of the kind")
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            predict(manager, tmp_path / name)
    video = write_video(tmp_path / "clip.mkv", case.frames[:2])
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"guerdon\[video\]"):
        predict(manager, video)


def test_several_cameras_and_stacks(tmp_path):
    torch.manual_seed(0)
    cameras = ("front", "wrist")
    settings = {"width": 8, "image_size": (3, SIZE, SIZE), "hidden_dim": 16, "image_keys": cameras}
    model = ResNetRewardModel(arch="resnet10", num_frames=2, **settings).eval()
    sizes = dict.fromkeys(cameras, (SIZE, SIZE, 3))
    contract = Contract.of(model, frame_sizes=sizes, threshold=0.5)
    manager = load_manager(save_checkpoint(tmp_path / "model", model, contract))
    rng = np.random.default_rng(0)
    views = {name: rng.integers(0, 255, (7, SIZE, SIZE, 3), dtype=np.uint8) for name in cameras}
    place = tmp_path / "both"
    write_pictures(place / "front", views["front"])
    with pytest.raises(DataError, match=r"nothing of \['wrist'\]"):
        predict(manager, place)
    with pytest.raises(DataError, match="shows nothing of"):
        predict(manager, place / "front")
    write_video(place / "wrist.mkv", views["wrist"])
    stacks = {
        name: frames[np.maximum([np.arange(-1, 6), np.arange(7)], 0).T] for name, frames in views.items()
    }
    wanted = manager.score(stacks).prob_success
    assert np.ptp(wanted) > 1e-4
    np.testing.assert_allclose(predict(manager, place), wanted, rtol=1e-5)
    for wrong, message in (
        (
            {**stacks, "front": stacks["front"][:3]},
            r"different numbers of frames: \{'front': 3, 'wrist': 7\}",
        ),
        (None, "frames by camera are needed, such as .*, not NoneType"),
        ("front", "frames by camera are needed, such as .*, not str"),
    ):
        with pytest.raises(DataError, match=message):
            manager.score(wrong)
    with pytest.MonkeyPatch.context() as patch:  # stacks go on over the edge of a batch
        patch.setattr(media, "MAX_BATCH_BYTES", 3 * views["front"][0].nbytes)
        np.testing.assert_allclose(predict(manager, place), wanted, rtol=1e-5)
    Image.fromarray(views["front"][0]).save(place / "front" / "frame7.png")
    with pytest.raises(DataError, match="different numbers of frames"):
        predict(manager, place)


def test_pictures_have_no_card(case, manager, tmp_path):
    folder = write_pictures(tmp_path / "clip", case.frames[:2])
    with pytest.raises(DataError, match="no labels"):
        score_path(manager, folder, tmp_path).labelled()


def test_one_bad_clip_or_episode_does_not_cost_the_others(case, manager, tmp_path, caplog):
    clips = tmp_path / "clips"
    clips.mkdir()
    write_video(clips / "a.mkv", case.frames[:3])
    (clips / "b.mkv").write_bytes(b"nothing of the kind")
    found = score_path(manager, clips, tmp_path)
    assert found.prob_success.shape == (3,) and [Path(name).name for name in found.sources] == ["a.mkv"]
    assert [Path(fault.path).name for fault in found.faults] == ["b.mkv"] and "b.mkv" in caplog.text
    (clips / "a.mkv").write_bytes(b"nor this")
    with pytest.raises(DataError, match="none of 2 clips"):
        score_path(manager, clips, tmp_path)
    data = tmp_path / "data"
    for kind in ("success", "failure"):
        write_pictures(data / kind, case.frames[:2])
    (data / "success" / "torn.png").write_bytes(b"torn")
    caplog.clear()
    found = score_path(manager, data, tmp_path / "copy")
    assert len(found.prob_success) == 4 and "torn.png" in caplog.text
    assert ["torn.png" in fault.path for fault in found.faults] == [True]
    assert ["torn.png" in fault["path"] for fault in summarize_scores(found, 0.5)["faults"]] == [True]


def test_frames_of_a_video_are_bounded_before_they_are_decoded(case, tmp_path, monkeypatch):
    wide = write_video(tmp_path / "wide.mkv", case.frames[:2])
    monkeypatch.setattr(videos, "MAX_VIDEO_PIXELS", SIZE * SIZE - 1)
    decoded = []
    monkeypatch.setattr(videos, "check_pixels", lambda *size: decoded.append(size))
    with pytest.raises(DataError, match=r"wide\.mkv is not a readable video"):  # the decoder itself refuses
        list(media.video_frames(wide))
    monkeypatch.undo()
    monkeypatch.setattr(videos, "MAX_VIDEO_PIXELS", SIZE * SIZE - 1)
    with pytest.raises(DataError, match=rf"wide\.mkv: has frames of {SIZE}x{SIZE} pixels; at most"):
        list(media.video_frames(wide))
