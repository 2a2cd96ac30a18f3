"""Fits in several real processes: the losses of one, checkpoints that travel, ends that are clear."""

import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException

from guerdon.config import (
    AugmentConfig,
    DistributedConfig,
    EarlyStopConfig,
    FitDataConfig,
    RewardConfig,
    RewardModelConfig,
)
from guerdon.core.errors import ConfigError, DataError, WorkerError
from guerdon.data.store import EpisodeStore
from guerdon.fit import FitJob, FSDPRewardWorker, fit_reward_model
from guerdon.fit.distributed import _raise_cause, run_rank
from guerdon.fit.distributed_model import use_synced_batch_norm
from guerdon.fit.process_group import PeerLostError, ProcessGroup
from guerdon.models import build_model, load_checkpoint
from guerdon.serve import RewardManager
from tests.fit.float64 import MARK, use_float64
from tests.fit.synthetic import write_store
from tests.plain_fit import plain_fit, plain_optim
from tests.processes import alive

# BatchNorm is trained, dropout and augmentation draw, two heads share an encoder: all that could disagree.
MODEL = RewardModelConfig(
    model_type="binary_classifier",
    arch="resnet10",
    width=8,
    image_size=(3, 32, 32),
    hidden_dim=16,
    dropout=0.3,
    num_members=2,
)

FIT = plain_fit(
    epochs=1,
    global_batch_size=32,
    log_interval=1,
    save_interval=4,
    val_check_interval=4,
    optim=plain_optim(lr=1e-3),
    augment=AugmentConfig(shift_pixels=2, color=0.2, blur=0.3, num_views=2),
)
EXACT = 1e-7
"""How far losses in float64 may part: nine steps of Adam make less than that of its 1e-16."""


@pytest.fixture(scope="module", autouse=True)
def two_threads():
    """Half for each of two processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def own_fork_server():
    """The server of `fit` below goes with these tests: the simulator's is another, which knows a driver."""
    multiprocessing.set_forkserver_preload(
        ["guerdon.fit.distributed", "torch._dynamo", "tests.fit.float64_server"]
    )
    forget = use_float64()
    yield
    forget()
    forkserver._forkserver._stop()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("distributed") / "data")


def on(data, processes=1, **changes):
    distributed = DistributedConfig(num_processes=processes, timeout_seconds=300)
    return replace(FIT, data=FitDataConfig(path=str(data)), distributed=distributed, **changes)


def fit(settings, folder, model=MODEL, start="forkserver", exact=False, **options):
    """A fit whose ranks are forked from a process that has imported what they need and done nothing else.

    `exact` computes in float64; forked ranks can, and this process.
    Started anew, as users have it (`spawn`), a rank spends most of so small a fit importing: that is left to
    the tests of how fits end, of what they print, and of commands.
    """
    if exact:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("guerdon.fit.distributed.START_METHOD", start)
        return fit_reward_model(model, settings, folder=folder, tensorboard=False, **options)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def assert_same_losses(left, right):
    """Of two fits in float64, step by step."""
    left, right = losses(left), losses(right)
    assert list(left) == list(right)
    np.testing.assert_allclose(list(left.values()), list(right.values()), rtol=EXACT)


def assert_same_course(left, right):
    """Of two fits in float32: the first loss is that of the same weights, the others may part a little.

    With two orders of summation and a rate of 1e-4 the losses of two steps differed by up to 7e-5, at 1e-3 by
    0.9% in ten steps (see `float64.py` for why).
    """
    left, right = losses(left), losses(right)
    assert list(left) == list(right)
    np.testing.assert_allclose(left[1], right[1], rtol=1e-5)
    np.testing.assert_allclose(list(left.values()), list(right.values()), rtol=0.01)


def frames_of(data, count=60):
    return {"main_images": EpisodeStore(data).frames("base_camera", range(count))}


def scores(checkpoint, data):
    model = RewardModelConfig(checkpoint_path=str(checkpoint))
    manager = RewardManager(RewardConfig(reward_type="continuous", model=model))
    return manager.compute_rewards(frames_of(data))


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, fit(on(data), folder, exact=True)


@pytest.fixture(scope="module", params=[pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def pair(request, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, fit(on(data, 2, backend=request.param), folder, exact=True)


def test_two_ranks_give_the_losses_of_one(alone, pair):
    assert_same_losses(alone[0], pair[0])
    assert len(losses(pair[0])) == pair[1].num_steps == alone[1].num_steps
    assert not list(pair[0].glob("features*"))


def test_their_checkpoint_is_that_of_one_process(alone, pair, data):
    one, two = alone[1], pair[1]
    assert two.metrics == pytest.approx(one.metrics, rel=1e-4, nan_ok=True)  # of weights kept in float32
    assert (two.best_step, two.num_steps) == (one.best_step, one.num_steps)
    for name in ("best.pt", "reward_model_best.pt", "step_4/checkpoint.pt"):
        left, right = (
            torch.load(folder / "checkpoints" / name, weights_only=True) for folder in (alone[0], pair[0])
        )
        assert left.keys() == right.keys()
        assert left["model_state_dict"].keys() == right["model_state_dict"].keys()
        states = left["optimizer_state_dict"]["state"], right["optimizer_state_dict"]["state"]
        assert states[0].keys() == states[1].keys()
        for key, entry in states[0].items():  # gradients of the right size, which Adam's steps do not show
            assert entry["step"] == states[1][key]["step"]
            torch.testing.assert_close(states[1][key]["exp_avg"], entry["exp_avg"], rtol=1e-5, atol=1e-9)
        for key, value in left["model_state_dict"].items():
            torch.testing.assert_close(right["model_state_dict"][key], value, rtol=1e-5, atol=1e-7)
            assert type(right["model_state_dict"][key]) is torch.Tensor
    np.testing.assert_allclose(
        scores(two.checkpoint, data), scores(one.checkpoint, data), rtol=1e-4, atol=1e-5
    )
    assert two.contract.threshold == load_checkpoint(two.checkpoint)[1].threshold


def assert_it_goes_on(folder, settings, tmp_path):
    """From the checkpoint of step 4 of the run in `folder`, to the losses that it had afterwards."""
    shutil.copytree(folder / "checkpoints" / "step_4", tmp_path / "step_4")
    fit(settings, tmp_path / "run", resume_dir=tmp_path, exact=True)
    before, after = losses(folder), losses(tmp_path / "run")
    assert list(after) == list(before)[4:]
    np.testing.assert_allclose(list(after.values()), list(before.values())[4:], rtol=EXACT)


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(pair, data, tmp_path):
    assert_it_goes_on(pair[0], on(data), tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_one_process_goes_on_in_two_ranks(alone, data, tmp_path):
    assert_it_goes_on(alone[0], on(data, 2, backend="fsdp"), tmp_path)


@pytest.mark.slow
def test_three_ranks_with_micro_batches_have_the_same_frames_in_flight(data, tmp_path):
    fit(on(data, global_batch_size=36, micro_batch_size=12), tmp_path / "one", exact=True)
    fit(on(data, 3, global_batch_size=36, micro_batch_size=4), tmp_path / "three", exact=True)
    assert_same_losses(tmp_path / "one", tmp_path / "three")


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """A model whose encoder counts as pretrained, and is run once."""
    path = tmp_path_factory.mktemp("encoder") / "encoder.pt"
    torch.manual_seed(7)
    torch.save(build_model(MODEL).resnet.state_dict(), path)
    return replace(MODEL, pretrained_encoder_path=str(path))


@pytest.mark.slow
def test_encoding_once_is_shared_and_accumulation_gives_the_whole_batch(frozen, data, tmp_path, capfd):
    fit(on(data, global_batch_size=239), tmp_path / "one", frozen)
    logging.getLogger("guerdon").setLevel(logging.INFO)
    try:  # the last batch has one frame: the second rank has none
        settings = on(data, 2, global_batch_size=239, micro_batch_size=50)
        fit(settings, tmp_path / "two", frozen, start="spawn")
    finally:
        logging.getLogger("guerdon").setLevel(logging.NOTSET)
    assert len(losses(tmp_path / "two")) == 2
    assert_same_course(tmp_path / "one", tmp_path / "two")
    assert not list((tmp_path / "two").glob("features*"))
    assert capfd.readouterr().err.count("fsdp over 2 processes, cpu") == 1  # rank 0 speaks for all


@pytest.mark.slow
def test_accumulation_in_one_process_draws_the_same_numbers(frozen, data, tmp_path, monkeypatch):
    monkeypatch.setattr("guerdon.fit.trainer.RewardModelTrainer._may_cache", lambda self: False)
    fit(on(data), tmp_path / "whole", frozen, exact=True)
    fit(on(data, micro_batch_size=5), tmp_path / "parts", frozen, exact=True)
    assert_same_losses(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_bf16_is_another_arithmetic_and_agrees_with_itself(data, tmp_path):
    slow = plain_optim(lr=1e-6)  # the weights stay: what differs is arithmetic, not what Adam makes of it
    fit(on(data, optim=slow), tmp_path / "exact", exact=True)
    fit(on(data, precision="bf16", optim=slow), tmp_path / "one")
    fit(on(data, 2, precision="bf16", optim=slow), tmp_path / "two")
    left, right, exact = (
        np.array(list(losses(tmp_path / name).values())) for name in ("one", "two", "exact")
    )
    assert np.abs(left - exact).max() > 1e-5
    np.testing.assert_allclose(left, exact, rtol=0.05)
    np.testing.assert_allclose(left, right, rtol=0.02)
    weights = load_checkpoint(tmp_path / "two" / "checkpoints" / "best_model")[0].state_dict()
    assert all(value.dtype != torch.bfloat16 for value in weights.values())


# Workers one by one, as another launcher would start them


def _work(rank, port, job, answers):
    """A process of a launcher that is not ours."""
    worker = FSDPRewardWorker(job, rank=rank, world_size=2, address="127.0.0.1", port=port)
    worker.init_worker()
    try:
        worker.save_checkpoint(job.folder / "at_start", 0)
        result = worker.fit()
        state = worker.process.trainer.progress
        answers.put((rank, state.step, state.bad_checks, result.best_step, result.threshold.threshold))
    finally:
        worker.close()


def _run(rank, port, job, answers):
    try:
        run_rank(rank, 2, "127.0.0.1", port, job)
        answers.put((rank, "no error"))
    except Exception as error:
        answers.put((rank, type(error).__name__, str(error)))


def in_two_processes(target, job):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    answers = context.Queue()
    processes = [context.Process(target=target, args=(rank, port, job, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    return processes, answers


@pytest.mark.slow
def test_workers_stop_early_at_the_same_step(data, tmp_path):
    settings = on(
        data,
        epochs=50,
        augment=AugmentConfig(shift_pixels=0, color=0.0),
        early_stop=EarlyStopConfig(patience=2, min_delta=0.05),
    )
    job = FitJob(model=replace(MODEL, num_members=1), cfg=settings, folder=tmp_path, tensorboard=False)
    processes, answers = in_two_processes(_work, job)
    first, second = sorted(answers.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert first[1:] == second[1:]
    assert first[1] < 50 * 6  # it did stop
    assert first[2] == 2
    step = torch.load(tmp_path / "at_start" / "step_0" / "checkpoint.pt", weights_only=True)
    assert step["progress"]["step"] == 0


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_also_without_our_launcher(data, tmp_path):
    job = FitJob(model=MODEL, cfg=on(data, epochs=1000), folder=tmp_path, tensorboard=False)
    processes, answers = in_two_processes(_run, job)
    wait_for_losses(tmp_path)
    processes[1].kill()
    rank, kind, message = answers.get(timeout=200)
    assert (rank, kind) == (0, "PeerLostError")
    assert "rank 0 of 2 lost contact with the others" in message
    processes[0].join(120)
    assert processes[0].exitcode == 0


def _normalise(rank, port, values, answers):
    """A batch of which the second process has nothing, through BatchNorm for two and for one."""
    with ProcessGroup.join(rank, 2, address="127.0.0.1", port=port) as group:
        torch.manual_seed(0)
        left, right = nn.Sequential(nn.BatchNorm2d(3)), nn.BatchNorm2d(3)
        left[0].weight.data.uniform_()
        right.load_state_dict(left[0].state_dict())
        assert use_synced_batch_norm(left, group.new_group()) == 1
        x = torch.from_numpy(values)
        for split in (len(x), 3):  # all on rank 0, then on both
            mine = x[:split] if rank == 0 else x[split:]
            mine, whole = mine.clone().requires_grad_(), x.clone().requires_grad_()
            out, expected = left(mine), right(whole)
            (out**3).sum().backward()
            (expected**3).sum().backward()
            place = slice(0, split) if rank == 0 else slice(split, None)
            torch.testing.assert_close(out, expected[place], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine.grad, whole.grad[place], rtol=1e-4, atol=1e-5)
        grads = group.sum(left[0].weight.grad.double().numpy())
        np.testing.assert_allclose(grads, right.weight.grad, rtol=1e-4)
        for name, value in right.state_dict().items():
            torch.testing.assert_close(left[0].state_dict()[name], value)
    answers.put(rank)


@pytest.mark.slow
def test_batch_norm_of_all_ranks_is_that_of_one_also_if_a_rank_has_no_frame():
    values = np.random.default_rng(0).normal(2, 3, (7, 3, 4, 4)).astype(np.float32)
    processes, answers = in_two_processes(_normalise, values)
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(answers.get(timeout=60) for _ in processes) == [0, 1]


def test_a_worker_says_what_it_needs(data, tmp_path):
    job = FitJob(model=MODEL, cfg=on(data), folder=tmp_path)
    with pytest.raises(ConfigError, match="init_worker"):
        FSDPRewardWorker(job).fit()


# Ends


def wait_for_losses(folder, seconds=300):
    limit = time.monotonic() + seconds
    path = folder / "metrics.jsonl"
    while not (path.exists() and path.read_text().count("\n") > 2):
        assert time.monotonic() < limit, "the fit did not start"
        time.sleep(0.1)


def children(pid):
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# The patience is waited out in full. Forked ranks are there at the same time, so that less of it suffices.
@pytest.mark.parametrize(("kill", "start", "patience", "message"), [
    (signal.SIGKILL, "spawn", 600, r"rank 1 of 2 of the fit died by signal SIGKILL"),
    (signal.SIGSTOP, "forkserver", 15, r"rank 0 of 2 lost contact with the others.* within 15 s"),
])  # fmt: skip
@pytest.mark.slow
def test_a_rank_that_dies_or_hangs_ends_the_fit(data, tmp_path, kill, start, patience, message):
    def strike():
        wait_for_losses(tmp_path)
        ranks = sorted(multiprocessing.active_children(), key=lambda process: process._identity)
        assert len(ranks) == 2
        os.kill(ranks[1].pid, kill)
        struck.append(time.monotonic())

    struck = []
    distributed = DistributedConfig(num_processes=2, timeout_seconds=patience)
    settings = replace(on(data, epochs=1000), distributed=distributed)
    thread = threading.Thread(target=strike)
    thread.start()
    with pytest.raises(WorkerError, match=message):
        fit(settings, tmp_path, start=start)
    thread.join()
    assert time.monotonic() - struck[0] < 200
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_an_error_of_one_rank_is_the_error_of_the_fit(data, tmp_path):
    with pytest.raises(DataError, match="no checkpoint to resume from"):
        fit(on(data, 2), tmp_path, resume_dir=tmp_path)


def test_the_error_of_a_rank_that_only_lost_its_peers_is_not_the_one_that_is_raised(tmp_path):
    errors = PeerLostError("a consequence"), DataError("the cause")
    for rank, error in enumerate(errors):
        (tmp_path / str(rank)).write_bytes(pickle.dumps((None, error, "where")))
    (tmp_path / "2").write_bytes(pickle.dumps(("a result", None, "")))
    with pytest.raises(DataError, match="the cause") as raised:
        _raise_cause(tmp_path, 4, ProcessExitedException("", 0, 123, 1))
    assert "where" in str(raised.value.__cause__)


def test_a_rank_that_died_without_a_word_is_named(tmp_path):
    (tmp_path / "0").write_bytes(pickle.dumps((None, PeerLostError("a consequence"), "where")))
    with pytest.raises(WorkerError, match=r"rank 1 of 2 of the fit died by signal SIGKILL \(out of memory"):
        _raise_cause(tmp_path, 2, ProcessExitedException("", 1, 123, -9, "SIGKILL"))


def test_a_loss_that_is_not_finite_is_refused_by_all(data, tmp_path):
    settings = on(data, 2, optim=plain_optim(lr=1e30, clip_grad=0.0), save_interval=1000)
    with pytest.raises(DataError, match=r"not finite at step \d+"):
        fit(settings, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "simple"}, r"fit\.backend is simple, which is one process, but there are 2"),
        ({"global_batch_size": 1}, r"fit\.global_batch_size is 1: too few frames for 2 processes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_at_once(data, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        fit(on(data, 2, **changes), tmp_path)


def test_nccl_without_a_gpu_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    distributed = DistributedConfig(num_processes=2, communication="nccl")
    with pytest.raises(ConfigError, match="nccl, but there is no GPU"):
        fit(replace(on(data), distributed=distributed), tmp_path)


# Commands


def command(data, folder, *more):
    return [
        "train-reward",
        f"fit.data.path={data}",
        f"runner.logger.log_path={folder}",
        "runner.logger.backends=[]",
        "reward.model.model_type=binary_classifier",
        "reward.model.arch=resnet10",
        "reward.model.width=8",
        "reward.model.image_size=[3,32,32]",
        "fit.global_batch_size=32",
        "fit.log_interval=1",
        *more,
    ]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_nothing_is_left_when_the_command_is_ended(data, tmp_path, end):
    arguments = command(data, tmp_path / "run", "fit.epochs=1000", "fit.distributed.num_processes=2")
    process = subprocess.Popen(
        [sys.executable, "-m", "guerdon.cli.main", *arguments], stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        wait_for_losses(tmp_path / "run")
        started = children(process.pid)
        assert len(started) >= 2
        if end == signal.SIGINT:
            os.killpg(process.pid, end)  # as a terminal does
        else:
            process.kill()
        process.communicate(timeout=120)
        limit = time.monotonic() + 60
        while any(alive(pid) for pid in started) and time.monotonic() < limit:
            time.sleep(0.1)
        assert not any(alive(pid) for pid in started)
        assert process.returncode != 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


LEAVES = """
import sys, torch, torch.distributed as dist
from guerdon.fit.process_group import end_process, open_store
from datetime import timedelta

store = open_store("127.0.0.1", 0, 1, True, timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
group = dist.group.WORLD  # as a sharded model holds it
for _ in range(200):
    dist.all_gather([torch.empty(100_000)], torch.rand(100_000), async_op=True)
dist.destroy_process_group()
print("printed")
end_process(3)
"""


@pytest.mark.slow
def test_a_process_ends_while_gloo_still_holds_tensors(quick_commands):
    """Python's own shutdown aborts in a third of such cases."""
    for _ in range(8):
        result = subprocess.run(["python", "-c", LEAVES], capture_output=True, text=True, timeout=400)
        assert (result.returncode, result.stdout, result.stderr) == (3, "printed\n", "")


@pytest.mark.slow
def test_torchrun_gives_the_losses_of_the_command_alone(data, tmp_path, quick_commands):
    options = {"capture_output": True, "text": True, "timeout": 200}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launched = [*launcher, "-m", "guerdon.cli.main"]
    for name, program in (("alone", ["guerdon"]), ("torchrun", launched)):
        arguments = command(data, tmp_path / name, "fit.epochs=1", "--json")
        result = subprocess.run([*program, *arguments], **options)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["num_steps"] == 8  # printed once
    assert_same_course(tmp_path / "alone", tmp_path / "torchrun")
    assert (tmp_path / "torchrun" / "summary.json").exists()
