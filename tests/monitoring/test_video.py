"""Videos, read back: frames, sizes, and a curve that moves on."""

import time

import numpy as np
import pytest
from PIL import Image, ImageSequence

from guerdon.core.errors import ConfigError, DataError
from guerdon.monitoring.video import CURSOR, CURVE, FAINT, LIMIT, PANEL, STRIP, SUCCESS, write_video


def frames(count=50, size=(64, 64)):
    """A block that moves over a table from left to right."""
    images = np.full((count, *size, 3), (196, 186, 170), np.uint8)
    for number, image in enumerate(images):
        column = number * (size[1] - 8) // max(count - 1, 1)
        image[28:36, column : column + 8] = (200, 60, 60)
    return images


def read(path):
    with Image.open(path) as file:
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(file)]
        pictures = [np.asarray(frame.convert("RGB")).astype(int) for frame in ImageSequence.Iterator(file)]
        return np.stack(pictures), durations, file.info.get("loop")


def near(pictures, colour, margin=14):
    return np.abs(pictures - colour).max(axis=-1) <= margin


@pytest.fixture(scope="module")
def episode(tmp_path_factory):
    prob = np.linspace(0.05, 0.95, 50).astype(np.float32)
    path = tmp_path_factory.mktemp("video") / "new" / "episode.gif"
    started = time.process_time()  # other load does not count
    assert write_video(path, frames(), prob, 0.5, np.arange(50) >= 40, fps=20) == path
    seconds = time.process_time() - started
    return path, seconds


def test_it_has_every_frame_enlarged_at_its_time(episode):
    path, seconds = episode
    pictures, durations, loop = read(path)
    assert pictures.shape == (50, 256 + PANEL, 256, 3)
    assert durations == [50] * 50 and loop == 0
    assert [p.name for p in path.parent.iterdir()] == ["episode.gif"]  # no half-written file is left
    assert path.stat().st_size < 1_000_000
    assert seconds < 2.0
    block = near(pictures[:, :256], (200, 60, 60), 30)
    centre = [np.nonzero(mask)[1].mean() for mask in block]
    assert centre[0] < 40 and centre[-1] > 215 and np.all(np.diff(centre) >= 0)


def test_the_curve_moves_on_and_rises(episode):
    panel = read(episode[0])[0][:, 256:]
    drawn = near(panel, CURVE)
    count = drawn.sum(axis=(1, 2))
    assert count[0] < 10 and count[-1] > 300
    assert np.mean(np.diff(count) > 0) > 0.9
    assert near(panel, FAINT).sum(axis=(1, 2))[0] > 300 > 10 > near(panel, FAINT).sum(axis=(1, 2))[-1]
    cursor = [np.nonzero(near(shot, CURSOR))[1].mean() for shot in panel]
    assert cursor[0] < 12 and cursor[-1] > 243 and np.all(np.diff(cursor) > 3)
    rows, columns = np.nonzero(drawn[-1])
    assert rows[columns < 60].mean() > rows[columns > 200].mean() + 30  # up means likelier
    limit = np.nonzero(near(panel[0], LIMIT))[0]
    assert len(limit) > 80 and np.ptp(limit) == 0
    assert rows.min() < limit[0] < rows.max()


def test_success_is_marked_where_it_is(episode):
    pictures = read(episode[0])[0]
    edge = near(pictures[:, :4, :256], SUCCESS).mean(axis=(1, 2))
    assert np.all(edge[:40] == 0) and np.all(edge[40:] > 0.95)
    bar = near(pictures[0, -STRIP:], SUCCESS).all(axis=0)
    assert not bar[:190].any() and bar[205:248].all()


def test_frames_without_a_verdict_leave_a_gap_and_unknown_success_no_mark(tmp_path):
    prob = np.full(20, 0.9, np.float32)
    prob[5:15] = np.nan
    write_video(tmp_path / "a.gif", frames(20, (48, 80)), prob, 0.5)
    pictures, durations, _ = read(tmp_path / "a.gif")
    assert pictures.shape == (20, 240 + PANEL, 400, 3) and durations[0] == 100
    columns = np.unique(np.nonzero(near(pictures[-1, 240:], CURVE))[1])
    assert np.diff(columns).max() > 180
    assert not near(pictures, SUCCESS).any()


def test_one_grey_frame_is_a_video_too(tmp_path):
    write_video(tmp_path / "a.gif", np.full((1, 32, 32, 1), 90, np.uint8), np.ones(1, np.float32), 0.5)
    pictures, *_ = read(tmp_path / "a.gif")
    assert pictures.shape == (1, 224 + PANEL, 224, 3)
    assert near(pictures[0, :224], (90, 90, 90)).all()


def test_what_does_not_fit_is_refused(tmp_path):
    prob = np.zeros(4, np.float32)
    with pytest.raises(DataError, match=r"uint8 \[T, H, W, 3\], not float32 \[4, 8, 8, 3\]"):
        write_video(tmp_path / "a.gif", np.zeros((4, 8, 8, 3), np.float32), prob, 0.5)
    with pytest.raises(DataError, match=r"values must have shape \[5\], not \[4\]"):
        write_video(tmp_path / "a.gif", frames(5), prob, 0.5)
    with pytest.raises(DataError, match=r"env_success must have shape \[4\], not \[3\]"):
        write_video(tmp_path / "a.gif", frames(4), prob, 0.5, np.zeros(3, bool))
    with pytest.raises(ConfigError, match="fps"):
        write_video(tmp_path / "a.gif", frames(4), prob, 0.5, fps=0)
    assert list(tmp_path.iterdir()) == []
