"""The reward card, looked at: as a text, and in a real browser."""

import base64
import io
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from guerdon.data.datasets.audit import AuditReport, Finding
from guerdon.fit.calibrate import calibrate, choose_threshold
from guerdon.fit.metrics import LabelledScores, summarize, trade_off
from guerdon.monitoring.advice import next_steps, worst_episodes
from guerdon.monitoring.card import sample_episodes, write_card
from guerdon.monitoring.page import percent
from guerdon.monitoring.verdict import REWARDS, CardInputs, judge
from tests.browser import dump_dom, screenshot

SECTIONS = [
    "What it can be used for",
    "What to do next",
    "Which threshold",
    "How well it separates",
    "Whether its probabilities are honest",
    "Probability over time",
    "Worst false positives",
    "Worst false negatives",
    "Errors by phase of the episode",
    "Speed",
    "Data",
    "Contract",
]
AUDIT = AuditReport(
    path="reward_data",
    findings=(Finding(level="info", check="balance", message="60 success and 60 failure episodes"),),
    num_episodes=120,
    num_duplicate_pairs=0,
)


def picture(episode, step, success_at):
    """A gripper that moves a block towards a green goal; it arrives when the label turns."""
    frame = np.full((64, 64, 3), (196, 186, 170), np.uint8)
    frame[40:] = (120, 98, 80)
    frame[44:60, 44:60] = (70, 160, 90)
    share = min(1.0, (step + 1) / success_at)
    row, column = int(12 + 36 * share), int(6 + (episode * 7) % 20 + (42 - (episode * 7) % 20) * share)
    frame[row : row + 8, column : column + 8] = (200, 60, 60)
    frame[max(0, row - 12) : row, column + 2 : column + 6] = (60, 60, 70)
    return frame


def make_inputs(num_failures=60, num_successes=60, gap=7.5, noise=1.0, seed=0, **changes):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(30, 50, num_failures + num_successes)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    step = np.concatenate([np.arange(n) for n in lengths])
    success = np.arange(len(lengths)) >= num_failures
    onset = np.where(success, (lengths * 0.6).astype(int), 60)
    labels = (step >= onset[episode]).astype(np.float32)
    logits = -6 + gap * labels + noise * (rng.normal(size=len(lengths))[episode] + rng.normal(size=len(step)))
    logits += 2.5 * (step == onset[episode] - 1)
    calibration = calibrate(logits, labels, episode, seed=0)
    scores = LabelledScores(
        prob_success=calibration.apply(logits), labels=labels, episode=episode, step=step, success=success
    )
    threshold = choose_threshold(scores, seed=0)
    values = {
        "title": "Block on goal",
        "checkpoint": "runs/demo/checkpoints/best_model",
        "scores": scores,
        "threshold": threshold,
        "calibration": calibration,
        "metrics": summarize(scores, threshold.threshold),
        "frame": lambda number, at: picture(number, at, onset[number]),
        "contract": {
            "arch": "resnet10",
            "image": {"size": [3, 64, 64], "layout": "hwc"},
            "mean": [0.0] * 512,
        },
        "audit": AUDIT,
        "data_hash": "sha256:0123456789abcdef",
        "speed": {"milliseconds_per_batch_of_256": 41.25, "frames_per_second_fp32": 6204.0},
    }
    return CardInputs(**{**values, **changes})


class Outline(HTMLParser):
    """Collects tags with their attributes, and checks that they close in order."""

    VOID = frozenset({"meta", "img", "line", "rect", "circle", "polyline", "polygon"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.stack, self.headings = [], [], []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack[-1:] == ["h2"]:
            self.headings.append(data)

    def all(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]


@pytest.fixture(scope="module")
def inputs():
    return make_inputs()


@pytest.fixture(scope="module")
def strong():
    """A model that nothing can be said against."""
    return make_inputs(200, 200, gap=12.0, noise=0.7)


@pytest.fixture(scope="module")
def card(inputs, tmp_path_factory):
    path = tmp_path_factory.mktemp("card") / "new" / "card.html"
    write_card(path, inputs)
    return path


def test_structure_is_whole_and_self_contained(card, inputs):
    text = card.read_text(encoding="utf-8")
    outline = Outline(text)
    assert outline.headings[0] == judge(inputs).headline
    assert outline.headings[1:] == SECTIONS
    assert len(text.encode()) < 3_000_000
    assert not outline.all("script") and not outline.all("link")
    assert not re.search(r"(https?:)?//[a-z]|url\(|@import", re.sub(r'src="data:[^"]*"', "", text))
    sources = [attrs["src"] for attrs in outline.all("img")]
    assert len(sources) >= 30
    for source in sources:
        kind, data = source.split(",", 1)
        assert kind == "data:image/png;base64"
        assert Image.open(io.BytesIO(base64.b64decode(data))).size == (64, 64)
    assert len(outline.all("svg")) == 4 + len(sample_episodes(inputs))
    assert all(attrs["aria-label"] for attrs in outline.all("svg"))
    for words in ("sha256:0123456789abcdef", "image.size", "512 values", "6,204", "before the first success"):
        assert words in text


@pytest.mark.system
def test_a_browser_draws_all_of_it(card, inputs, tmp_path):
    dom = dump_dom(card)
    samples = len(sample_episodes(inputs))
    assert dom.count("<svg") == 4 + samples
    assert dom.count("<img") == card.read_text().count("<img") >= 30
    page = np.asarray(Image.open(screenshot(card, tmp_path / "card.png")).convert("RGB")).astype(int)
    assert page.shape == (4000, 1000, 3)

    def pixels(colour, rows=slice(None)):
        return int((np.abs(page[rows] - colour).max(axis=-1) <= 12).sum())

    verdict = {"good": (0x1A, 0x7F, 0x37), "care": (0x9A, 0x67, 0x00), "bad": (0xC0, 0x26, 0x2D)}
    assert pixels(verdict[judge(inputs).level], slice(0, 400)) > 1500  # the box around the verdict
    assert pixels((0x25, 0x63, 0xC9)) > 5000  # curves
    assert pixels((0xC0, 0x26, 0x2D)) > 3000  # thresholds, operating points, borders of failure frames
    for colour in ((196, 186, 170), (120, 98, 80), (70, 160, 90), (200, 60, 60)):  # the pictures themselves
        assert pixels(colour) > 2000
    used = np.flatnonzero(np.ptp(page.max(axis=-1), axis=1) > 40)
    assert used.max() > 2500 and np.diff(used).max() < 120  # no large blank stretch from top to bottom


@pytest.mark.system
def test_a_dark_phone_shows_it_too(card, tmp_path):
    picture = screenshot(card, tmp_path / "phone.png", width=500, height=3000, dark=True)
    page = np.asarray(Image.open(picture).convert("L"))
    assert page[:, -6:].std() < 12  # nothing runs over the edge
    assert 5 < np.median(page) < 60


def test_text_is_escaped(tmp_path):
    nasty = "<script>alert('x')</script> & \"quotes\""
    finding = Finding(level="warning", check=nasty, message=nasty, examples=(nasty,))
    audit = AuditReport(path=nasty, findings=(finding,), num_episodes=1, num_duplicate_pairs=0)
    inputs = make_inputs(
        4, 4, title=nasty, checkpoint=nasty, data_hash=nasty, contract={nasty: {nasty: nasty}}, audit=audit,
        speed={nasty: 1.0},
    )  # fmt: skip
    write_card(tmp_path / "card.html", inputs)
    text = (tmp_path / "card.html").read_text()
    assert "<script" not in text
    assert not Outline(text).all("script")
    assert text.count("&lt;script&gt;") >= 9


def test_good_model_is_trusted(strong):
    verdict = judge(strong)
    assert verdict.level == "good", verdict
    assert verdict.headline.startswith("Trust it for rewards")
    assert [level for level, _ in verdict.reasons] == ["good"] * 5
    assert {verdict.use(name).level for name in REWARDS} == {"good"}


@pytest.mark.parametrize(
    ("change", "uses", "level", "words"),
    [
        ({"audit": None}, REWARDS, "care", "not audited"),
        ({"metrics": {"auc": 0.95}}, ["continuous"], "care", "95.00% of pairs"),
        ({"metrics": {"auc": 0.8}}, ["continuous"], "bad", "80.00% of pairs"),
        ({"metrics": {"auc": float("nan")}}, REWARDS, "bad", "one class only"),
        ({"metrics": {"true_positive_rate": 0.9}}, ["binary"], "care", "90% of success frames fire"),
        ({"metrics": {"true_positive_rate": 0.436}}, ["binary"], "care", "43.6% of success frames fire"),
        ({"metrics": {"true_positive_rate": 0.03}}, ["binary"], "bad", "3% of success frames fire"),
        ({"metrics": {"false_positive_rate": 0.03}}, ["binary"], "care", "3% of failure frames fire wrongly"),
        ({"metrics": {"false_positive_rate": 0.2}}, ["binary"], "bad", "20% of failure frames fire wrongly"),
        ({"metrics": {"ece": 0.1}}, ["continuous"], "care", "off by 10%"),
        ({"metrics": {"final_true_positive_rate": 0.8}}, ["terminal"], "care", "80% of the successes fire"),
        ({"metrics": {"final_false_positive_rate": 0.4}}, ["terminal"], "bad", "40% of the failures"),
        ({"metrics": {"final_true_positive_rate": float("nan")}}, ["terminal"], "bad", "No episode ends in"),
        ({"threshold": {"caveat": "Only 8 failure episodes."}}, REWARDS, "care", "Only 8 failure episodes."),
        ({"threshold": {"enough_data": False}}, REWARDS, "care", "too few episodes"),
        ({"threshold": {"false_positive_interval": (0.0, 0.2)}}, ["binary"], "care", "0% to 20%"),
        ({"threshold": {"false_positive_interval": (0.02, 0.2)}}, ["binary"], "bad", "2% to 20%"),
    ],
)
def test_each_rule_decides_for_the_uses_that_need_it(strong, change, uses, level, words):
    if "metrics" in change:
        change = {"metrics": {**strong.metrics, **change["metrics"]}}
    if "threshold" in change:
        change = {"threshold": replace(strong.threshold, **change["threshold"])}
    verdict = judge(replace(strong, **change))
    assert {name: verdict.use(name).level for name in REWARDS} == {
        name: level if name in uses else "good" for name in REWARDS
    }
    assert verdict.reasons[0][0] == level and words in verdict.reasons[0][1]
    assert all(words in verdict.use(name).reason for name in uses)
    if uses == REWARDS:
        assert verdict.level == level
        assert verdict.headline.startswith({"care": "Usable with care for", "bad": "Do not use it"}[level])
    else:
        assert verdict.level == "care" and verdict.headline.startswith("Trust it for")
        wanted = {"care": "usable with care for", "bad": "not for"}[level]
        assert f"; {wanted} {uses[0]} rewards" in verdict.headline


def test_every_interval_holds_its_rate_also_where_the_promise_does_not(strong, tmp_path):
    """The card showed the rate of one data set beside the interval that another one had promised."""
    fresh = make_inputs(40, 40, gap=4.0, noise=2.0, seed=5, threshold=strong.threshold)
    fresh = replace(fresh, metrics=summarize(fresh.scores, strong.threshold.threshold))
    low, high = strong.threshold.false_positive_interval
    rate = fresh.metrics["false_positive_rate"]
    assert not low <= rate <= high
    here = fresh.measured
    assert here.false_positive_interval[0] <= rate <= here.false_positive_interval[1]
    assert here.false_positive_rate == rate and here.threshold == strong.threshold.threshold
    low, high = here.true_positive_interval
    assert low <= fresh.metrics["true_positive_rate"] <= high
    write_card(tmp_path / "card.html", fresh)
    text = (tmp_path / "card.html").read_text()
    shown = " to ".join(map(percent, here.false_positive_interval))
    promised = " to ".join(map(percent, strong.threshold.false_positive_interval))
    assert f"{shown}; promised {promised}" in text and "of another kind" in text


# What to do next


def test_a_strict_threshold_is_advised_to_be_lowered(strong):
    strict = replace(strong.threshold, threshold=float(np.quantile(strong.scores.prob_success, 0.95)))
    inputs = replace(
        strong, threshold=strict, metrics=summarize(strong.scores, strict.threshold), data="fresh data"
    )
    assert inputs.metrics["true_positive_rate"] < 0.5
    (step, *_) = next_steps(inputs, judge(inputs))
    assert "of the success frames fire at" in step.why and "reward.reward_threshold=" in step.why
    words = shlex.split(step.command)
    assert (
        words[:3] == ["guerdon", "reward", "recalibrate"] and words[words.index("--data") + 1] == "fresh data"
    )
    rate = float(words[words.index("--fpr") + 1])
    (point,) = trade_off(strong.scores, (rate,))
    assert point.true_positive_rate >= 0.8 and point.threshold < strict.threshold


def test_false_fires_are_advised_by_kind_and_episode():
    weak = make_inputs(60, 60, gap=5.5, noise=1.2)
    loose = replace(weak.threshold, threshold=0.05)
    inputs = replace(weak, threshold=loose, metrics=summarize(weak.scores, 0.05))
    steps = next_steps(inputs, judge(inputs))
    assert f"--fpr {loose.target_false_positive_rate:g}" in steps[0].command
    reported = next(step for step in steps if "of the false fires are in" in step.why)
    fired = (weak.scores.prob_success > np.float32(0.05)) & (weak.scores.labels < 0.5)
    counts = np.bincount(weak.scores.episode[fired])
    assert str(int(counts.argmax())) in reported.why and "target_failure=60" in reported.command
    assert worst_episodes(inputs)[0] == counts.argmax()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"auc": 0.8}, "no threshold mends"),
        ({"auc": float("nan")}, "both kinds"),
        ({"ece": 0.1}, "Calibrate on these episodes"),
    ],
)
def test_other_weaknesses_have_their_step(strong, change, words):
    inputs = replace(strong, metrics={**strong.metrics, **change})
    assert any(words in step.why and step.command for step in next_steps(inputs, judge(inputs)))


def test_a_good_model_is_advised_to_be_used(strong):
    (step,) = next_steps(strong, judge(strong))
    assert "reward.reward_type=continuous" in step.command and strong.checkpoint in step.command
    few = replace(strong, threshold=replace(strong.threshold, enough_data=False))
    assert "rests on few episodes" in next_steps(few, judge(few))[-1].why


def test_an_audit_error_forbids_use_and_frequent_wrong_episodes_forbid_ending(strong):
    error = Finding(level="error", check="alignment", message="labels belong to other frames")
    verdict = judge(replace(strong, audit=replace(AUDIT, findings=(error,))))
    assert verdict.level == "bad"
    assert "labels belong to other frames" in verdict.reasons[0][1]
    calm = {**strong.metrics, "failure_episode_fire_rate": 0.01, "early_fire_episode_rate": 0.0}
    assert judge(replace(strong, metrics=calm)).headline.endswith("and for ending episodes.")
    unknown = {**calm, "failure_episode_fire_rate": float("nan")}
    assert "nothing shows" in judge(replace(strong, metrics=unknown)).headline
    hasty = {**calm, "early_fire_episode_rate": 0.4}
    assert "not for ending episodes" in judge(replace(strong, metrics=hasty)).headline
    assert "40%" in judge(replace(strong, metrics=hasty)).headline


@pytest.mark.parametrize(("failures", "successes"), [(5, 0), (1, 1)])
def test_scarce_data_still_make_a_card(tmp_path, failures, successes):
    inputs = make_inputs(failures, successes, audit=None, speed={}, contract={}, data_hash="")
    verdict = write_card(tmp_path / "card.html", inputs)
    assert verdict.level == ("bad" if not successes else "care")
    outline = Outline((tmp_path / "card.html").read_text())
    assert outline.headings[1:] == SECTIONS


def test_large_noisy_frames_keep_the_card_small(tmp_path):
    rng = np.random.default_rng(0)
    inputs = make_inputs(gap=3.0, frame=lambda *_: rng.integers(0, 256, (256, 256, 3), dtype=np.uint8))
    write_card(tmp_path / "card.html", inputs)
    assert (tmp_path / "card.html").stat().st_size < 3_000_000
    sizes = {
        Image.open(io.BytesIO(base64.b64decode(attrs["src"].split(",", 1)[1]))).size
        for attrs in Outline((tmp_path / "card.html").read_text()).all("img")
    }
    assert sizes == {(96, 96), (128, 128)}
