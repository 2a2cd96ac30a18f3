"""Ctrl-C and kills in real processes: what there is stays, the message says how to go on, nobody is left."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from guerdon.cli.main import main
from tests.fit.synthetic import write_store
from tests.processes import alive, wait_for

FOREVER = 10_000_000
FIT = [
    "train-reward",
    "runner.logger.backends=[]",
    "reward.model.model_type=binary_classifier",
    "reward.model.arch=resnet10",
    "reward.model.width=8",
    "reward.model.image_size=[3,32,32]",
    "fit.global_batch_size=32",
    "fit.log_interval=1",
    "fit.save_interval=100000",
    f"fit.epochs={FOREVER}",
]
TRAIN = [
    "train",
    "reward.use_reward_model=false",
    "runner.logger.backends=[]",
    "env.train.num_envs=2",
    "env.eval.num_envs=2",
    "learner.eval_episodes=2",
    "learner.eval_interval=100000000",
    "learner.save_interval=100000000",
    f"learner.total_steps={FOREVER}",
    "learner.ppo.num_steps=32",
    "learner.sac.learning_starts=64",
    "learner.sac.batch_size=16",
    "learner.sac.updates_per_step=0.05",
    "learner.sac.buffer_size=4000",
]
ZOO = [
    "zoo",
    "--config-name=cartpole_rnd",
    f"learner.total_steps={FOREVER}",
    "learner.eval_interval=100000000",
    "learner.eval_episodes=2",
    "learner.save_interval=100000000",
    "stop_value=null",
]
RUNS = {
    "train": TRAIN,
    "asynchronous": [*TRAIN, "learner.algorithm=sac", "asynchronous.enabled=true"],
    "zoo": ZOO,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("data") / "store")


@contextlib.contextmanager
def running(arguments, folder):
    """The command in a process group of its own, as a terminal has it; it is learning when this begins."""
    process = subprocess.Popen(
        [sys.executable, "-m", "guerdon.cli.main", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=folder,
    )  # fmt: skip
    try:
        wait_for(
            lambda: sum(path.read_text().count("\n") for path in folder.rglob("metrics.jsonl")) > 2, process
        )
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def children(pid):
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def last_step(folder):
    (metrics,) = folder.rglob("metrics.jsonl")
    return max((json.loads(line)["step"] for line in metrics.read_text().splitlines()), default=0)


def interrupted(process):
    """Press Ctrl-C; returns the step, the checkpoint and the command that the message names."""
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 1
    assert "Traceback" not in err
    *_, message, command = err.strip().splitlines()
    found = re.fullmatch(
        r"guerdon: interrupted at step (\d+), which is saved; (\S+)=(\S+) goes on from there:", message
    )
    assert found, err
    assert command.endswith(f"{found[2]}={found[3]}")
    return int(found[1]), Path(found[3]), shlex.split(command)


# A fit


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_in_a_fit_keeps_every_step(data, tmp_path, monkeypatch, capsys, processes):
    arguments = [*FIT, f"fit.data.path={data}", f"fit.distributed.num_processes={processes}"]
    with running(arguments, tmp_path) as process:
        step, checkpoint, command = interrupted(process)
    assert step == last_step(tmp_path) > 2
    assert (tmp_path / checkpoint / "checkpoint.pt").is_file()
    assert command[:2] == ["guerdon", "train-reward"]
    monkeypatch.chdir(tmp_path)
    assert main([*command[1:], "fit.epochs=1", "fit.distributed.num_processes=1"]) == 0
    assert f"at step {step}\n" in capsys.readouterr().err


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    program = """
        import time
        from guerdon.core.interrupts import Interrupts
        with Interrupts() as interrupts, interrupts.deferred():
            print("in", flush=True)
            time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "in\n"
        process.send_signal(signal.SIGINT)
        process.stderr.readline()
        assert "Ctrl-C again ends at once" in process.stderr.readline()
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode != 0
    finally:
        process.kill()
        process.communicate()


# Training


@pytest.mark.parametrize(
    "kind", ["train", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("asynchronous", "zoo"))]
)
def test_ctrl_c_in_training_keeps_every_step(tmp_path, monkeypatch, capsys, kind):
    with running(RUNS[kind], tmp_path) as process:
        step, checkpoint, command = interrupted(process)
    assert step == last_step(tmp_path) > 0
    assert (tmp_path / checkpoint / "state.pt").is_file()
    monkeypatch.chdir(tmp_path)
    assert main([*command[1:], f"learner.total_steps={step}"]) == 0
    assert f"at step {step}\n" in capsys.readouterr().err


def test_the_command_that_goes_on_names_one_checkpoint(tmp_path):
    from guerdon.cli.main import _command_to_go_on
    from guerdon.core.errors import RunInterrupted

    stopped = RunInterrupted(7, "runs/my run/step_7", "runner.resume_dir")
    command = _command_to_go_on(["train", "runner.resume_dir=runs/old", "seed=3"], stopped)
    assert shlex.split(command) == ["guerdon", "train", "seed=3", "runner.resume_dir=runs/my run/step_7"]


# Nobody is left

LAUNCHER = textwrap.dedent(
    """
    import os, sys, threading, time
    from pathlib import Path
    from guerdon.cli.main import main

    def fork_a_sibling():
        while not Path(sys.argv[1]).exists():
            time.sleep(0.05)
        child = os.fork()  # it holds the pipes to the ranks open
        if child == 0:
            time.sleep(600)
            os._exit(0)
        Path(sys.argv[2]).write_text(str(child))

    if __name__ == "__main__":
        threading.Thread(target=fork_a_sibling, daemon=True).start()
        sys.exit(main(sys.argv[3:]))
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_parent_whoever_holds_its_pipes(data, tmp_path, end):
    program, note = tmp_path / "launcher.py", tmp_path / "sibling"
    metrics = tmp_path / "run" / "metrics.jsonl"
    program.write_text(LAUNCHER)
    arguments = [*FIT, f"fit.data.path={data}", "fit.distributed.num_processes=2"]
    process = subprocess.Popen(
        [sys.executable, program, metrics, note, *arguments, f"runner.logger.log_path={tmp_path / 'run'}"],
        stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    sibling, ranks = None, []
    try:
        wait_for(lambda: note.exists() and note.read_text() and last_step(tmp_path) > 2, process)
        sibling = int(note.read_text())
        ranks = [pid for pid in children(process.pid) if b"spawn_main" in command_line(pid)]
        assert len(ranks) == 2
        process.send_signal(end)
        process.wait(60)
        wait_for(lambda: not any(alive(pid) for pid in ranks), seconds=60)
        assert alive(sibling)
    finally:
        process.kill()
        process.wait()
        for pid in [*ranks, *([sibling] if sibling else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# A folder for each


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path):
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from guerdon.training.folders import new_run_folder\n"
        "time.strftime = lambda form: '20260101-000000'\n"
        "print(*[new_run_folder(Path(sys.argv[1])) for _ in range(40)])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "runs")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = [name for process in processes for name in process.communicate()[0].split()]
    assert len(set(folders)) == len(folders) == 120


@pytest.mark.slow
def test_a_run_keeps_others_out_of_its_folder(data, tmp_path, capsys):
    arguments = [*FIT, f"fit.data.path={data}", f"runner.logger.log_path={tmp_path / 'run'}"]
    with running(arguments, tmp_path) as process:
        before = (tmp_path / "run" / "config.yaml").read_bytes()
        assert main([*arguments, "seed=5"]) == 1
        assert "is used by a run that is not over" in capsys.readouterr().err
        assert main([*TRAIN, f"runner.logger.log_path={tmp_path / 'run'}"]) == 1
        assert (tmp_path / "run" / "config.yaml").read_bytes() == before
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    left = tmp_path / "run" / "checkpoints" / "step_3" / ".1-abcdef.tmp"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"half")
    assert main([*arguments, "fit.epochs=1"]) == 0  # a killed run holds nothing
    assert not left.exists()
