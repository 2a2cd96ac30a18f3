"""The report of a run, from made-up files: as a text, and in a real browser."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from guerdon.core.errors import DataError
from guerdon.data.datasets.pictures import save_picture
from guerdon.monitoring.report import HEADLINES, judge_run, write_report
from guerdon.monitoring.run_files import read_run
from guerdon.monitoring.video import write_video
from tests.browser import dump_dom, screenshot
from tests.monitoring.test_card import Outline

SECTIONS = [
    "Rewards",
    "Success",
    "Alarms",
    "What the monitor saw",
    "Sample episodes",
    "Time",
    "All metrics",
    "Settings",
]
NASTY = "<script>alert('x')</script> & \"quotes\""


def write_run(folder, *, alarms=True, agreement=0.99, gap=0.02, drop=(), num_videos=2, alarms_on=None):
    """A run of 40 iterations whose learned reward runs ahead of the env's in the second half."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    lines = []
    for number in range(40):
        share = number / 39
        learned = 0.8 * share + 0.02 * rng.normal()
        env = (0.8 * share if not alarms else 0.4 * min(share, 0.5)) + 0.02 * rng.normal()
        line = {
            "step": (number + 1) * 1000,
            "env/success_once": min(max(env, 0.0), 1.0),
            "env/success_at_end": min(max(0.9 * env, 0.0), 1.0),
            "env/return": 10 * env,
            "rollout/rewards": learned,
            "rollout/env_rewards": env,
            "rollout/learned_rewards": 0.95 * learned,
            "reward/prob_mean": learned,
            "reward/fire_rate": min(max(learned, 0.0), 1.0),
            "reward/agreement": agreement,
            "time/compute_model_rewards": 0.25,
            "time/steps_per_second": 1234.5,
            "train/policy_loss": -0.1,
            "monitor/success_gap": gap + (alarms_on is None) * alarms * 0.6 * share,
            "monitor/alarms": float(alarms and number > 25),
            "monitor/alarms_on": float(alarms and number > 25) if alarms_on is None else alarms_on,
        }
        if number % 10 == 9:
            line |= {"eval/success_once": line["env/success_once"], "eval/success_at_end": 0.1}
        lines.append({name: value for name, value in line.items() if not name.startswith(tuple(drop))})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"algorithm": "ppo", "seconds": 81.5, "stopped": None}))
    (folder / "config.yaml").write_text("seed: 0\nreward:\n  combine_mode: replace\n")
    (folder / "card.html").write_text("<p>card</p>")
    for number in range(num_videos):
        frames = rng.integers(0, 255, (6, 32, 32, 3), dtype=np.uint8)
        (folder / "videos").mkdir(exist_ok=True)
        write_video(
            folder / "videos" / f"eval_{number}.gif", frames, np.linspace(0, 1, 6, dtype=np.float32), 0.5
        )
    if alarms:
        place = folder / "alarms" / "success_gap_27000"
        place.mkdir(parents=True, exist_ok=True)
        for number in range(3):
            save_picture(place / f"{number:02d}.png", np.full((64, 64, 3), (200, 60, 60), np.uint8))
        alarm = {
            "name": "success_gap",
            "step": 27000,
            "value": 0.415,
            "limit": 0.3,
            "remedy": "label these frames as failures and refit",
            "frames": [f"alarms/success_gap_27000/{number:02d}.png" for number in range(3)],
        }
        (folder / "alarms.jsonl").write_text(2 * (json.dumps(alarm) + "\n"))  # a resumed run says it again
    return folder


@pytest.fixture(scope="module")
def cheated(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("runs") / "cheated", agreement=0.6)
    assert write_report(folder) == folder / "report.html"
    return folder


def text_of(folder):
    return write_report(folder).read_text(encoding="utf-8")


def test_structure_is_whole_and_self_contained(cheated):
    text = (cheated / "report.html").read_text(encoding="utf-8")
    outline = Outline(text)
    assert outline.headings == [HEADLINES["bad"], *SECTIONS]  # nothing was left out
    assert not outline.all("script") and not outline.all("link")
    assert not re.search(r"(https?:)?//[a-z]|url\(|@import", re.sub(r'src="data:[^"]*"', "", text))
    assert [attrs["href"] for attrs in outline.all("a")] == ["card.html"]
    kinds = [attrs["src"].split(",")[0] for attrs in outline.all("img")]
    assert kinds == ["data:image/png;base64"] * 3 + ["data:image/gif;base64"] * 2
    film = outline.all("img")[-1]["src"].split(",")[1]
    assert Image.open(io.BytesIO(base64.b64decode(film))).n_frames == 6
    for words in (
        "At the end model and environment agree on 60.0% of the frames.",
        "1 alarm(s): success gap.",
        "success gap at step 27,000: 0.415, limit 0.3",
        "label these frames as failures and refit",
        "compute model rewards",
        "81.5",
        "combine_mode: replace",
        "train/policy_loss",
        "40,000",
    ):
        assert words in text, words


def test_curves_show_the_numbers_and_the_alarm(cheated):
    text = (cheated / "report.html").read_text()
    rewards = re.search(r'aria-label="Rewards over the run".*?</svg>', text, re.DOTALL)[0]
    for style in ("training", "env", "learned"):
        points = re.search(rf'<polyline class="{style}" points="([^"]*)"', rewards)[1].split()
        height = np.array([float(point.split(",")[1]) for point in points])
        assert len(points) == 40
        risen = height[0] - height[-1]
        assert risen > 120 if style != "env" else 20 < risen < 90
    line = re.search(r'<rect class="alarm" x="([\d.]+)"', rewards)[1]
    assert float(line) == pytest.approx(56 + 27 / 40 / 1.03 * (800 - 10 - 56), abs=0.2)
    assert text.count('<rect class="alarm"') == 2  # once in each of the two plots


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"alarms": False}, "good", "99.0% of the frames"),
        ({"alarms": False, "agreement": 0.9}, "care", "90.0% of the frames"),
        ({"alarms": False, "agreement": 0.5}, "bad", "50.0% of the frames"),
        ({"alarms": False, "gap": 0.2}, "care", "20.0% of the last episodes"),
        ({"alarms": False, "gap": 0.5}, "bad", "50.0% of the last episodes"),
        ({"alarms": True}, "bad", "The model alone calls"),
        ({"alarms": True, "alarms_on": 1.0}, "bad", "1 alarm(s): success gap."),
        ({"alarms": True, "alarms_on": 0.0}, "care", "all of them ended"),
        ({"alarms": False, "drop": ["monitor/"]}, "care", "not monitored for reward hacking"),
        ({"alarms": False, "drop": ["reward/agreement"]}, "care", "does not tell success"),
        ({"alarms": False, "drop": ["reward/", "monitor/"]}, "care", "No learned reward was measured"),
    ],
)
def test_the_verdict_follows_from_agreement_and_alarms(tmp_path, change, level, words):
    run = read_run(write_run(tmp_path / "run", num_videos=0, **change))
    found, reasons = judge_run(run)
    assert found == level
    assert words in reasons[0][1]
    assert HEADLINES[level] in text_of(tmp_path / "run")


def test_a_run_that_was_stopped_says_so(tmp_path):
    folder = write_run(tmp_path / "run", alarms=False, num_videos=0)
    (folder / "summary.json").write_text('{"stopped": "alarm: drift"}')
    assert ("care", "The run was stopped early: alarm: drift.") in judge_run(read_run(folder))[1]


def test_missing_pieces_are_named(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    text = text_of(empty)
    assert Outline(text).headings == [HEADLINES["care"], *SECTIONS, "Left out"]
    for words in (
        "metrics.jsonl",
        "summary.json",
        "config.yaml",
        "card.html",
        "no videos",
        "left no metrics",
    ):
        assert words in text, words
    part = write_run(tmp_path / "part", drop=["rollout/learned"], num_videos=6)
    (part / "alarms" / "success_gap_27000" / "01.png").unlink()
    with (part / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41000, "env/succ')  # torn by a kill
    text = text_of(part)
    assert "Not measured: learned reward (rollout/learned_rewards)." in text
    assert "1 line(s) of metrics.jsonl could not be read." in text
    assert "alarms/success_gap_27000/01.png is not in the run" in text
    assert "2 more episodes are in videos/." in text
    assert text.count("data:image/gif") == 4 and text.count("data:image/png") == 2
    with pytest.raises(DataError, match="no folder of a run"):
        write_report(tmp_path / "nowhere")


def test_text_is_escaped_and_no_file_outside_is_read(tmp_path):
    folder = write_run(tmp_path / "run<b>", num_videos=1)
    save_picture(tmp_path / "secret.png", np.zeros((4, 4, 3), np.uint8))
    values = {"step": 1, "value": 1, "limit": 1}
    alarm = {**values, "name": NASTY, "remedy": NASTY, "frames": ["../secret.png", NASTY]}
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n" + json.dumps({"name": "no numbers"}) + "\n")
    (folder / "config.yaml").write_text(NASTY)
    (folder / "summary.json").write_text(json.dumps({"stopped": NASTY, "algorithm": NASTY}))
    with (folder / "metrics.jsonl").open("a") as file:
        for name in (NASTY, f"time/{NASTY}", f"monitor/{NASTY}"):
            file.write(json.dumps({"step": 50000, name: 1.0}) + "\n")
        file.write('{"step": 50000, "env/return": NaN, "train/x": "words", "train/y": null}\n')
    (folder / "videos" / "eval_0.gif").rename(folder / "videos" / "<img onerror=x>.gif")
    text = text_of(folder)
    outline = Outline(text)
    assert not outline.all("script") and "<img onerror" not in text and "run<b>" not in text
    assert text.count("&lt;script&gt;") >= 8
    assert "data:image/png" not in text
    assert "secret.png is not in the run" in text


@pytest.mark.system
def test_a_browser_draws_all_of_it(cheated, tmp_path):
    dom = dump_dom(cheated / "report.html")
    assert dom.count("<svg") == 3 and dom.count("<img") == 5
    picture = screenshot(cheated / "report.html", tmp_path / "report.png", height=2400)
    page = np.asarray(Image.open(picture).convert("RGB")).astype(int)

    def pixels(colour, rows=slice(None)):
        return int((np.abs(page[rows] - colour).max(axis=-1) <= 12).sum())

    assert pixels((0xC0, 0x26, 0x2D), slice(0, 400)) > 1500  # the box around the verdict
    for colour in ((0x25, 0x63, 0xC9), (0x1A, 0x7F, 0x37), (0x9A, 0x67, 0x00)):  # three rewards
        assert pixels(colour, slice(250, 1100)) > 800
    assert pixels((200, 60, 60)) > 5000  # the alarm's frames
    used = np.flatnonzero(np.ptp(page.max(axis=-1), axis=1) > 40)
    assert used.max() > 1500 and np.diff(used).max() < 120  # no large blank stretch
