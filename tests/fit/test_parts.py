"""The small parts of fitting: sampling, batches, schedules, augmentation, logs."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guerdon.config import AugmentConfig, LRScheduleConfig
from guerdon.data.datasets.sampling import EpochSampler, global_batches, shares
from guerdon.fit.inputs import augment
from guerdon.fit.logs import MetricLog
from guerdon.fit.state import Progress, lr_at

NONE = {"shift_pixels": 0, "color": 0.0}


def sampler(episodes=10, steps=20, positives=4, **options):
    episode = np.repeat(np.arange(episodes), steps)
    positive = np.tile(np.arange(steps) >= steps - positives, episodes)
    return EpochSampler(
        rows=np.arange(episodes * steps) + 1000, positive=positive, episode=episode, **options
    )


def test_an_epoch_shows_every_frame_once_in_an_order_of_its_own():
    frames = sampler()
    first, second = frames.epoch(0), frames.epoch(1)
    assert sorted(first.tolist()) == sorted(second.tolist()) == frames.rows.tolist()
    assert first.tolist() != second.tolist()
    np.testing.assert_array_equal(first, sampler().epoch(0))  # a pure function of seed and epoch
    assert sampler(seed=1).epoch(0).tolist() != first.tolist()


def test_failures_are_limited_and_drawn_anew_each_epoch():
    frames = sampler(fail_success_ratio=1.5)
    seen = set()
    for number in range(40):
        rows = frames.epoch(number) - 1000
        good = frames.positive[rows]
        assert (int(good.sum()), int((~good).sum())) == (40, 60)
        seen |= set(rows.tolist())
    assert len(seen) == 200  # nothing is lost for good


def test_a_few_frames_of_each_episode():
    frames = sampler(num_samples_per_episode=3)
    rows = frames.epoch(5) - 1000
    np.testing.assert_array_equal(np.bincount(frames.episode[rows]), np.full(10, 3))
    assert len(set(rows.tolist())) == 30


def test_an_episode_with_fewer_frames_gives_what_it_has():
    frames = EpochSampler(
        rows=np.arange(5),
        positive=np.zeros(5, bool),
        episode=np.array([0, 0, 0, 0, 1]),
        num_samples_per_episode=2,
    )
    assert sorted(frames.episode[frames.epoch(0)].tolist()) == [0, 0, 1]


@given(
    st.integers(1, 200),
    st.integers(1, 50),
    st.integers(1, 4),
    st.none() | st.integers(1, 20),
    st.integers(1, 2),
)
def test_ranks_share_every_batch_without_overlap(count, size, world, micro, least):
    rows = np.arange(count) + 1000
    batches = list(global_batches(rows, size, least=least))
    assert np.concatenate(batches).tolist() == rows.tolist()
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert min(least, count) <= len(batches[-1]) <= size + least - 1 or size < least
    for batch in batches:
        by_rank = [shares(batch, micro, rank=rank, world_size=world, least=least) for rank in range(world)]
        assert len({len(passes) for passes in by_rank}) == 1  # nobody waits for a pass that never comes
        everyone = [share for passes in by_rank for share in passes]
        assert sorted(np.concatenate([share.rows for share in everyone]).tolist()) == batch.tolist()
        assert all(micro is None or len(share.rows) <= micro + least - 1 for share in everyone)
        for share in everyone:
            assert share.total == len(batch)
            np.testing.assert_array_equal(batch[share.positions], share.rows)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 6), (2, 3), (3, 2)])
def test_the_frames_in_flight_are_the_same_however_many_ranks_share_them(ranks, micro):
    batch = np.arange(14)
    passes = zip(*(shares(batch, micro, rank=rank, world_size=ranks) for rank in range(ranks)), strict=True)
    together = [sorted(np.concatenate([share.rows for share in each]).tolist()) for each in passes]
    assert together == [list(range(6)), list(range(6, 12)), [12, 13]]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 6), (2, 3), (3, 2)])
def test_a_frame_that_would_be_alone_joins_those_before_it(ranks, micro):
    assert [len(batch) for batch in global_batches(np.arange(13), 6, least=2)] == [6, 7]
    assert [len(batch) for batch in global_batches(np.arange(14), 6, least=2)] == [6, 6, 2]
    assert [len(batch) for batch in global_batches(np.arange(1), 6, least=2)] == [1]
    batch = np.arange(13)
    by_rank = [shares(batch, micro, rank=rank, world_size=ranks, least=2) for rank in range(ranks)]
    together = [
        sorted(np.concatenate([share.rows for share in each]).tolist()) for each in zip(*by_rank, strict=True)
    ]
    assert together == [list(range(6)), list(range(6, 13))]


def test_schedules():
    warm = LRScheduleConfig(name="constant", warmup_steps=10)
    assert [lr_at(step, 100, 1.0, warm) for step in (0, 4, 9, 10, 99)] == [0.1, 0.5, 1.0, 1.0, 1.0]
    cosine = LRScheduleConfig(name="cosine", warmup_steps=10, min_lr=0.1)
    assert lr_at(10, 110, 1.0, cosine) == 1.0
    assert lr_at(60, 110, 1.0, cosine) == pytest.approx(0.55)
    assert lr_at(110, 110, 1.0, cosine) == pytest.approx(0.1)
    steps = LRScheduleConfig(name="step", warmup_steps=0, step_size=5, gamma=0.5)
    assert [lr_at(step, 100, 1.0, steps) for step in (0, 4, 5, 9, 10)] == [1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.fixture
def pictures():
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (16, 24, 20, 3), dtype=np.uint8))


def test_no_augmentation_changes_nothing(pictures):
    assert augment(pictures, AugmentConfig(**NONE), torch.Generator()) is pictures


@pytest.mark.parametrize(
    "settings",
    [{"shift_pixels": 3}, {"crop_fraction": 0.3}, {"color": 0.4}, {"blur": 1.0}, {"color": 0.2, "blur": 0.5}],
)
def test_augmentation_changes_pictures_and_is_repeatable(pictures, settings):
    cfg = AugmentConfig(**{**NONE, **settings})
    first, again, other = (augment(pictures, cfg, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert (first.shape, first.dtype) == (pictures.shape, torch.uint8)
    assert torch.equal(first, again)
    assert not torch.equal(first, pictures)
    if settings != {"blur": 1.0}:
        assert not torch.equal(first, other)


def test_a_shift_is_by_whole_pixels_and_differs_between_pictures(pictures):
    moved = augment(pictures, AugmentConfig(shift_pixels=2, color=0.0), torch.Generator().manual_seed(0))
    offsets = []
    for before, after in zip(pictures, moved, strict=True):
        found = [
            (dy, dx)
            for dy in range(-2, 3)
            for dx in range(-2, 3)
            if torch.equal(after[4:-4, 4:-4], before[4 + dy : -4 + dy or None, 4 + dx : -4 + dx or None])
        ]
        offsets += found[:1]
    assert len(offsets) == 16
    assert len(set(offsets)) > 5


def test_blur_keeps_brightness(pictures):
    blurred = augment(pictures, AugmentConfig(**NONE, blur=1.0), torch.Generator())
    assert blurred.float().mean() == pytest.approx(pictures.float().mean().item(), abs=1.5)
    assert blurred.float().std() < 0.6 * pictures.float().std()


def test_the_log_resumes_where_the_checkpoint_was(tmp_path):
    with MetricLog(tmp_path) as log:
        for step in range(1, 6):
            log.write(step, {"train/loss": step / 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "trai')  # torn by a kill
    with MetricLog(tmp_path, resume_step=3) as log:
        log.write(4, {"train/loss": math.pi})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["train/loss"] == math.pi
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) >= 1


def test_the_lower_loss_decides_between_equal_validations():
    state, steps = Progress(), []
    for step, (auc, loss) in enumerate(
        [(0.9, 0.5), (1.0, 0.6), (1.0, 0.2), (1.0, 0.3), (0.99, 0.1)], start=1
    ):
        state.step = step
        if state.is_best({"val_auc": auc, "val_accuracy": 0.5, "val_loss": loss}, "val_auc", 0.0):
            steps.append(step)
    assert steps == [1, 2, 3] and state.best_step == 3 and state.metrics["val_loss"] == 0.2
    assert state.bad_checks == 3  # an equal validation is no improvement
