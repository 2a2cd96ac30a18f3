"""The command: results on stdout, logs on stderr, exit codes, no tracebacks for user errors."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from guerdon.cli.main import main
from guerdon.core.types import Episode
from guerdon.data.formats import get_format
from guerdon.data.store import EpisodeStore, StoreWriter

SMALL = [
    "env.train.num_envs=8",
    "env.train.init_params.image_size=[16,16]",
    "collect.target_success=4",
    "collect.target_failure=4",
    "collect.policy=scripted",
    "collect.policy_noise=0.5",
]


def run(capsys, *arguments):
    """Exit code, stdout, stderr, in this process."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "data"
    assert main(["collect", *SMALL, f"collect.save_dir={path}"]) == 0
    return path


def test_collect_meets_its_targets(data, capsys):
    code, out, _ = run(capsys, "data", "inspect", data, "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["format"] == "native"
    assert (summary["num_success_episodes"], summary["num_failure_episodes"]) == (4, 4)
    assert summary["num_episodes"] == 8 + summary["num_incomplete_episodes"]
    assert summary["cameras"] == {"base_camera": [16, 16, 3]}
    assert summary["faults"] == []
    assert summary["num_frames"] > 400 - 1
    assert 0 < summary["num_positive_frames"] < summary["num_frames"]
    assert summary["bytes"] > 0


def test_inspect_for_people(data, capsys):
    code, out, err = run(capsys, "data", "inspect", data)
    assert code == 0
    assert re.search(r"^episodes +\d+ \(4 success, 4 failure, \d+ unfinished\)$", out, re.M)
    assert "base_camera 16x16x3" in out
    assert err == ""


def test_inspect_draws_a_preview(data, capsys, tmp_path):
    code, _, _ = run(capsys, "data", "inspect", data, "--preview", tmp_path / "sheet.png")
    assert code == 0
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert sheet.shape == (6 * 96, 8 * 96, 3)
    assert sheet.std() > 10


def test_collect_again_adds_new_episodes_and_resume_completes(capsys, tmp_path):
    place = f"collect.save_dir={tmp_path / 'data'}"
    code, out, _ = run(capsys, "collect", *SMALL, place, "--json")
    assert code == 0
    assert json.loads(out)["num_success"] == 4
    more = ["collect.target_success=6", "collect.target_failure=5"]
    code, out, _ = run(capsys, "collect", *SMALL, *more, place, "--resume", "--json")
    assert (code, json.loads(out)["num_success"], json.loads(out)["num_failure"]) == (0, 6, 5)
    store = EpisodeStore(tmp_path / "data")
    whole = store.complete
    assert (int((store.success & whole).sum()), int((~store.success & whole).sum())) == (6, 5)
    digests = store.episode_column("digest")
    assert len(set(digests)) == len(digests)  # none was collected twice


def test_resume_with_nothing_left_to_do(data, capsys):
    code, out, _ = run(capsys, "collect", *SMALL, f"collect.save_dir={data}", "--resume", "--json")
    assert code == 0
    assert json.loads(out)["env_steps"] == 0


@pytest.mark.parametrize(
    "format",
    [
        "npy-trajectory",
        "pkl-episode",
        "reward-pt",
        "folder",
        pytest.param("realworld-pkl", marks=pytest.mark.slow),
    ],
)
def test_convert_there_and_back(data, capsys, tmp_path, format):
    there = tmp_path / ("data.pkl" if format == "realworld-pkl" else "there")
    code, out, _ = run(capsys, "data", "convert", data, there, "--to", format, "--json")
    assert (code, json.loads(out)["faults"]) == (0, [])
    code, out, _ = run(capsys, "data", "inspect", there, "--json")
    assert (code, json.loads(out)["format"]) == (0, format)
    assert run(capsys, "data", "convert", there, tmp_path / "back", "--to", "native")[0] == 0
    original, back = EpisodeStore(data), EpisodeStore(tmp_path / "back")
    frames = [sorted(e.frames["base_camera"].tobytes() for e in store) for store in (original, back)]
    assert frames[0] == frames[1]
    assert back.labels.sum() == original.labels.sum()


def test_collect_in_rlinfs_formats(capsys, tmp_path):
    for format, pattern in {
        "pkl-episode": "success/episode_*.pkl",
        "npy-trajectory": "positive/*.npy",
    }.items():
        place = tmp_path / format
        code, _, _ = run(capsys, "collect", *SMALL, f"collect.save_dir={place}", f"collect.format={format}")
        assert code == 0
        assert len(list(place.glob(pattern))) == 4


def test_collect_with_rlinfs_reward_section(capsys, tmp_path):
    places = [f"reward.data_collection.{kind}_dir={tmp_path / kind}" for kind in ("positive", "negative")]
    limits = [f"reward.data_collection.max_{kind}_trajectories=3" for kind in ("positive", "negative")]
    code, out, _ = run(capsys, "collect", *SMALL, "reward.collect_data=True", *places, *limits, "--json")
    assert (code, json.loads(out)["format"]) == (0, "npy-trajectory")
    assert len(list((tmp_path / "positive").glob("*.npy"))) == 3
    assert len(list((tmp_path / "negative").glob("*.npy"))) == 3


def test_a_policy_that_never_succeeds_ends_with_a_clear_line(capsys, tmp_path):
    options = [
        *SMALL,
        "collect.policy=random",
        "collect.max_episodes=16",
        f"collect.save_dir={tmp_path / 'd'}",
    ]
    code, _, err = run(capsys, "collect", *options)
    assert code == 1
    assert "gave up after 16 episodes with success 0/4 fail 4/4" in err
    assert "Traceback" not in err
    assert len(EpisodeStore(tmp_path / "d")) >= 4  # kept all the same


def test_a_checkpoint_policy(capsys, tmp_path):
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "policy.json").write_text('{"kind": "mlp", "activation": "tanh", "squash": true}')
    from guerdon.envs.tabletop.scene import STATE_SIZE

    sizes = [STATE_SIZE, 8, 4]
    weights = {}
    for number, (into, out) in enumerate(itertools.pairwise(sizes)):
        weights[f"{number}.weight"], weights[f"{number}.bias"] = torch.zeros(out, into), torch.ones(out)
    save_file(weights, folder / "policy.safetensors")
    options = ["collect.policy=checkpoint", f"collect.policy_checkpoint={folder}", "collect.policy_noise=0"]
    place = f"collect.save_dir={tmp_path / 'd'}"
    code, _, _ = run(capsys, "collect", *SMALL, *options, "collect.target_success=0", place)
    assert code == 0
    actions = EpisodeStore(tmp_path / "d").read_episode(0).actions
    np.testing.assert_allclose(actions, np.tanh(1.0), atol=1e-6)
    (folder / "policy.json").write_text('{"kind": "transformer"}')
    code, _, err = run(capsys, "collect", *SMALL, *options, place)
    assert (code, "kind='transformer'" in err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["collect", "collect.polisy=random"], 2, "collect.policy"),
        (["collect", "collect.policy=scriptd"], 2, "scripted"),
        (["collect", "env.train.num_envs=many"], 2, "env.train.num_envs"),
        (["collect", "env.train.init_params.obs_mod=rgb"], 2, "obs_mode"),
        (["collect", "env.train.id=guerdon/Tabletp-v0"], 2, "guerdon/Tabletop-v0"),
        (["collect", "collect.cameras=[front]"], 2, "front"),
        (["collect", "--config-name", "colect"], 2, "collect"),
        (["collect", "collect.policy=checkpoint"], 2, "policy_checkpoint"),
        (["collect", "collect.policy=checkpoint", "collect.policy_checkpoint=nowhere"], 1, "nowhere"),
        (["data", "inspect", "nowhere"], 1, "nowhere"),
        (["data", "convert", "nowhere", "x", "--to", "native"], 1, "nowhere"),
    ],
)
def test_wrong_use_is_explained_in_a_line_or_two(arguments, code, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, out, err = run(capsys, *arguments)
    assert result == code
    assert message in err
    assert len(err.strip().splitlines()) <= 3
    assert out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["data"],
        ["data", "convert", "a", "b"],
        ["data", "inspect"],
        ["check", "a=b"],
        ["collect", "--x"],
    ],
)
def test_usage_errors_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_the_installed_command_shows_a_traceback_only_if_asked(tmp_path):
    command = [Path(sys.executable).with_name("guerdon"), "data", "inspect", tmp_path / "nowhere"]
    plain, debug = (
        subprocess.run([*command, *flags], capture_output=True, text=True) for flags in ([], ["--debug"])
    )
    assert plain.returncode == 1
    assert plain.stderr.startswith("guerdon: error: ")
    assert plain.stderr.count("\n") == 1
    assert "Traceback" in debug.stderr


def test_unknown_formats_name_the_nearest(data, capsys, tmp_path):
    code, _, err = run(capsys, "data", "convert", data, tmp_path / "x", "--to", "pkl-episodes")
    assert code == 1
    assert "pkl-episode" in err
    code, _, err = run(capsys, "data", "convert", data, tmp_path / "x", "--to", "rlinf-episode")
    assert (code, "read but not written" in err) == (1, True)


def test_an_unwritable_target_is_a_clear_error(data, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "data", "convert", data, tmp_path / "file" / "x", "--to", "native")
    assert code == 1
    assert "not a directory" in err
    code, _, err = run(capsys, "collect", *SMALL, f"collect.save_dir={tmp_path / 'file' / 'x'}")
    assert code == 1
    assert "not a directory" in err


def test_mixed_sizes_the_majority_is_used_and_the_rest_named(capsys, tmp_path):
    def episode(size, camera="base_camera"):
        frames = np.random.default_rng(size).integers(0, 256, (4, size, size, 3), dtype=np.uint8)
        return Episode(frames={camera: frames}, labels=np.ones(4, np.float32), success=True)

    with get_format("npy-trajectory").writer(tmp_path / "npy") as writer:
        writer.add_many([episode(9), episode(8), episode(8), episode(8, "other"), episode(8)])
    code, out, _ = run(capsys, "data", "inspect", tmp_path / "npy", "--json")
    summary = json.loads(out)
    assert (code, summary["num_episodes"]) == (0, 3)
    assert summary["cameras"] == {"base_camera": [8, 8, 3]}
    reasons = {Path(fault["path"]).name: fault["reason"] for fault in summary["faults"]}
    assert "images of 9x9x3, most episodes have 8x8x3" in reasons["000000.npy"]
    assert "has no camera 'base_camera'" in reasons["000003.npy"]
    code, out, _ = run(
        capsys, "data", "convert", tmp_path / "npy", tmp_path / "native", "--to", "native", "--json"
    )
    assert (code, json.loads(out)["num_episodes"], len(json.loads(out)["faults"])) == (0, 3, 2)
    code, out, _ = run(capsys, "data", "audit", tmp_path / "npy")
    assert code == 1
    assert "000000.npy" in out


def test_audit_of_fresh_data_is_clean(data, capsys):
    code, out, _ = run(capsys, "data", "audit", data, "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (0, True)


def test_process_writes_collected_data_beside_the_pickle(capsys, tmp_path):
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    actions = np.array([[1, 0], [0, 0], [1, 0], [0, 0], [0, 0], [0, 0]], np.float32)
    labels = np.array([0, 0, 0, 1, 1, 1], np.float32)
    end = np.arange(6) == 5
    episode = Episode(
        frames={"base_camera": frames},
        labels=labels,
        success=True,
        actions=actions,
        states=rng.random((6, 3), np.float32),
        env_rewards=labels,
        terminated=end,
        truncated=np.zeros(6, bool),
    )
    with get_format("realworld-pkl").writer(tmp_path / "data.pkl") as writer:
        writer.add(episode)
    code, out, _ = run(capsys, "data", "process", tmp_path / "data.pkl", "--json")
    assert (code, json.loads(out)["num_episodes"]) == (0, 1)
    cleaned = EpisodeStore(tmp_path / "collected_data").read_episode(0)
    # the idle frame goes, the held success stays
    np.testing.assert_array_equal(cleaned.frames["base_camera"], frames[[0, 2, 3, 4, 5]])
    np.testing.assert_array_equal(cleaned.labels, labels[[0, 2, 3, 4, 5]])


@pytest.mark.slow
def test_check_says_what_works(capsys):
    code, out, _ = run(capsys, "check", "--json")
    parts = {part["name"]: part for part in json.loads(out)["parts"]}
    assert code == 0
    assert parts["torch works"]["ok"]
    assert parts["tabletop"]["ok"]
    assert parts["ray"]["optional"]


@pytest.mark.slow
def test_the_demo_leaves_a_summary(capsys, tmp_path):
    small = ["collect.target_success=20", "collect.target_failure=20", "fit.epochs=4", "reward.model.width=8"]
    size = ["env.train.init_params.image_size=[32,32]", "reward.model.image_size=[3,16,16]"]
    size += ["learner.total_steps=6400", "learner.eval_episodes=50"]
    code, out, _ = run(capsys, "demo", "--json", f"runner.output_dir={tmp_path}", *small, *size)
    assert code == 0
    summary = json.loads(out)
    folder = Path(summary["folder"])
    assert folder.parent == tmp_path / "demo"
    saved = json.loads((folder / "summary.json").read_text())
    assert saved["stage1"] == summary["stage1"]
    assert summary["stage1"].keys() >= {"episodes_success", "episodes_failure", "frames", "seconds"}
    assert summary["stage1"]["episodes_success"] >= 20 and summary["stage1"]["episodes_failure"] >= 20
    assert summary["stage1"]["audit_ok"]
    assert summary["stage2"].keys() >= {"val_auc", "threshold", "false_positive_rate", "seconds"}
    assert summary["stage2"]["val_auc"] > 0.6
    assert (folder / "preview.png").stat().st_size > 10_000
    assert "<svg" in (folder / "card.html").read_text()
    stage3 = summary["stage3"]
    assert stage3.keys() >= {"success_rate", "episodes", "env_steps", "seconds", "reward"}
    assert stage3["reward"] == "learned (replace)" and stage3["episodes"] == 50
    assert stage3["env_steps"] == 6400
    rates = [stage3[f"{name}success_rate"] for name in ("start_", "", "off_", "true_")]
    assert all(0 <= rate <= 1 for rate in rates) and rates[0] > 0  # untrained: none
    arms = folder / "train" / "seed_0"
    assert Path(stage3["run"]) == arms / "learned"
    assert "arm-off" in (folder / "train" / "prove.html").read_text()
    entries = [json.loads(line) for line in (arms / "off" / "metrics.jsonl").read_text().splitlines()]
    assert {entry["rollout/rewards"] for entry in entries if "rollout/rewards" in entry} == {0.0}
    assert "<svg" in (arms / "learned" / "report.html").read_text()
    assert summary["seconds"] >= stage3["seconds"]


ENDLESS = [
    "env.train.num_envs=4",
    "env.train.init_params.image_size=[16,16]",
    "env.train.init_params.max_episode_steps=10",
    "collect.policy=random",
    "collect.target_success=1000000",
    "collect.target_failure=1000000",
]


def start_endless(place):
    command = [sys.executable, "-m", "guerdon.cli.main", "collect", *ENDLESS, f"collect.save_dir={place}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 480
    while time.monotonic() < deadline:
        if (place / "manifest.json").exists() and len(EpisodeStore(place)) >= 20:
            return process
        time.sleep(0.02)
    process.kill()
    raise AssertionError(process.communicate()[1])


def test_kill_minus_9_loses_no_finished_episode(capsys, tmp_path):
    place = tmp_path / "data"
    process = start_endless(place)
    before = set(EpisodeStore(place).episode_column("digest"))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    store = EpisodeStore(place)
    assert before <= set(store.episode_column("digest"))
    assert store.faults == []
    assert all(episode.num_frames == 10 and episode.complete for episode in store)
    count = len(store)
    options = [*ENDLESS, f"collect.save_dir={place}", "--resume", "--json", "collect.target_success=0"]
    code, out, _ = run(capsys, "collect", *options, f"collect.target_failure={count + 8}")
    assert (code, json.loads(out)["num_failure"]) == (0, count + 8)
    store = EpisodeStore(place)
    assert int(store.complete.sum()) == count + 8
    assert before <= set(store.episode_column("digest"))


def test_ctrl_c_finishes_writing(tmp_path):
    place = tmp_path / "data"
    process = start_endless(place)
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=480)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "interrupted" in err
    assert "Traceback" not in err
    assert list(place.glob("shards/*/journal.log")) == []  # sealed
    store = EpisodeStore(place)
    assert store.manifest["num_episodes"] == len(store) >= 20


@pytest.mark.slow
def test_two_collectors_share_a_store(tmp_path):
    place = tmp_path / "data"
    command = [sys.executable, "-m", "guerdon.cli.main", "collect", *SMALL, f"collect.save_dir={place}"]
    processes = [
        subprocess.Popen([*command, f"seed={seed}"], stderr=subprocess.PIPE, text=True) for seed in (1, 2)
    ]
    for process in processes:
        _, err = process.communicate(timeout=480)
        assert process.returncode == 0, err
    store = EpisodeStore(place)
    assert store.faults == []
    assert int((store.success & store.complete).sum()) == 8
    assert int((~store.success & store.complete).sum()) == 8


def test_an_empty_store_converts_to_a_clear_error(capsys, tmp_path):
    StoreWriter(tmp_path / "empty").close()
    code, _, err = run(capsys, "data", "convert", tmp_path / "empty", tmp_path / "x", "--to", "folder")
    assert code == 1
    assert "no usable episode" in err


def test_help_and_wrong_usage_do_without_torch():
    """They take a moment; torch alone takes seconds."""
    program = (
        "import contextlib, io, sys\n"
        "from guerdon.cli.main import VERBS, main\n"
        "for verb in VERBS:\n"
        "    for wrong in ('--help', '--no-such-flag'):\n"
        "        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "            try:\n"
        "                main([*verb.name.split(), wrong])\n"
        "            except SystemExit as stopped:\n"
        "                assert stopped.code == (0 if wrong == '--help' else 2), verb.name\n"
        "print(sorted({'torch', 'numpy', 'gymnasium', 'pyarrow', 'hydra'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_leave_the_core_to_others(given, policy, tmp_path):
    """Set before torch is loaded, later is too late; beside other work small networks need it."""
    program = (
        "import os, sys\n"
        "from guerdon.cli.main import main\n"
        "assert 'torch' not in sys.modules\n"
        f"main(['data', 'inspect', {str(tmp_path / 'none')!r}])\n"
        "print(os.environ['OMP_WAIT_POLICY'])\n"
    )
    variables = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    variables |= {} if given is None else {"OMP_WAIT_POLICY": given}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables)
    assert result.stdout.strip() == policy, result.stderr
