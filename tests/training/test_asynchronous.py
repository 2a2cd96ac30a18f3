"""Asynchronous runs: every step arrives once and in order, within bounds, and the policy learns as well."""

import functools
import json
import shutil
import threading
import time

import numpy as np
import pytest

from guerdon.agents.sac import SAC
from guerdon.cli.main import main
from guerdon.cli.train import train
from guerdon.config import load_config
from guerdon.core.errors import ConfigError, DataError, WorkerError
from guerdon.distributed import ThreadEngine
from guerdon.serve import RewardManager
from guerdon.training.env_worker import EnvWorker
from guerdon.training.run_parts import RunParts
from guerdon.training.trainer import EmbodiedRunner
from tests.training.counting import LENGTH
from tests.training.test_embodied import SAC as LEARNED

SHORT = [
    "env.train.id=tests.training.counting:Counting-v0",
    "env.eval.id=tests.training.counting:Counting-v0",
    "env.train.num_envs=3",
    "env.eval.num_envs=2",
    "learner.algorithm=sac",
    "learner.network.hidden=[8]",
    "learner.eval_episodes=2",
    "learner.total_steps=1500",
    "learner.save_interval=1000",
    "learner.sac.learning_starts=300",
    "learner.sac.batch_size=16",
    "learner.sac.buffer_size=9000",
    "learner.sac.updates_per_step=0.5",
    "runner.logger.backends=[]",
]
ASYNC = "asynchronous.enabled=true"


@pytest.fixture
def short(tmp_path):
    return [*SHORT, f"runner.logger.log_path={tmp_path / 'run'}"]


@pytest.fixture(scope="module")
def finished_short(tmp_path_factory):
    """`async` or `sync` -> (folder, summary, updates) of a run with `SHORT`, which tests only read."""

    @functools.cache
    def finished(kind):
        folder = tmp_path_factory.mktemp(kind) / "run"
        folder.mkdir()
        settings = [*SHORT, f"asynchronous.enabled={kind == 'async'}", f"runner.logger.log_path={folder}"]
        runner = EmbodiedRunner(load_config("train", settings), folder)
        summary = runner.run()
        return folder, summary, runner.learner.num_updates

    return finished


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("env-", "reward-"))]


@pytest.fixture
def make():
    """Makes runners; in the end their threads end, also those of a test that failed."""
    runners = []

    def one(settings, folder):
        folder.mkdir(exist_ok=True)
        runners.append(EmbodiedRunner(load_config("train", settings), folder))
        return runners[-1]

    yield one
    for runner in runners:
        runner.engine.close()
    assert threads() == []


def steps_of(part):
    """What a replay buffer holds, by the environment's own count: [rows, envs]."""
    return {name: ring[: len(part) // part.num_envs] for name, ring in {**part._steps, **part._obs}.items()}


# What arrives


def test_every_step_is_stored_once_and_in_order(short, tmp_path, make):
    runner = make([*short, ASYNC], tmp_path / "run")
    runner.loop.reset(5)
    for _ in range(3):
        runner.loop.advance(0.0)
    (part,) = runner.loop.replay.parts
    held, count = steps_of(part), len(part) // 3
    assert runner.loop.env_steps == len(part) >= 3 * 512
    expected = np.tile(np.arange(1, count + 1, dtype=np.float32)[:, None], (1, 3))
    np.testing.assert_array_equal(held["env_rewards"], expected)  # the reward is the count after the step
    np.testing.assert_array_equal(held["state"][:, :, 2], expected - 1)  # observed before it
    over = expected % LENGTH == 0
    odd = (expected // LENGTH) % 2 == 0  # the number of an episode that ends there, from 0
    np.testing.assert_array_equal(held["terminated"], over & odd)
    np.testing.assert_array_equal(held["truncated"], over & ~odd)
    batch = part.sample(500, gamma=0.9)
    after = batch.next_obs["state"][:, 2].numpy()  # also where an episode ended
    np.testing.assert_array_equal(after, batch.obs["state"][:, 2].numpy() + 1)


@pytest.mark.parametrize("algorithm", ["sac", pytest.param("dqn", marks=pytest.mark.slow)])
def test_as_many_steps_updates_and_episodes_as_synchronously(
    short, tmp_path, algorithm, make, finished_short
):
    short = [item.replace("Counting-v0", "CountingButtons-v0").replace("sac", "dqn") for item in short]
    results = []
    for kind, more in (("sync", []), ("async", [ASYNC])):
        if algorithm == "sac":
            folder, summary, num_updates = finished_short(kind)
        else:
            folder = tmp_path / kind
            runner = make([*short, *more, f"runner.logger.log_path={folder}"], folder)
            summary, num_updates = runner.run(), runner.learner.num_updates
        entries = lines(folder)
        episodes = sum(entry.get("env/episodes", 0) for entry in entries)
        saved = sorted(item.name for item in (folder / "checkpoints").iterdir())
        results.append((summary["env_steps"], num_updates, episodes, saved))
        if kind == "async":
            assert all(entry.get("env/length", LENGTH) == LENGTH for entry in entries)
            assert all(entry["async/pending_updates"] < 1 for entry in entries if entry["step"] % 1026 == 0)
    assert results[0] == results[1]
    assert results[1][1] > 500


def test_actions_are_random_first_and_then_the_learners(short, tmp_path, make):
    runner = make([*short, ASYNC, "learner.sac.initial_alpha=1e-6"], tmp_path / "run")
    runner.loop.reset(0)
    loop = runner.loop
    loop.learner.actor.flat.zero_()  # mean 0, deviation 1
    loop.learner._actor_adam.lr = 0.0
    size = len(loop.learner.actor.flat)
    loop.learner.actor.flat[size - 1] = -20.0  # no noise
    loop.advance(0.0)
    actions = steps_of(loop.replay.parts[0])["actions"][:, :, 0]
    assert np.abs(actions[:100]).mean() == pytest.approx(0.5, abs=0.05)  # uniform: 100 rows of 3 are 300
    np.testing.assert_allclose(actions[100:], 0.0, atol=1e-6)


def test_weights_travel_only_when_they_changed(short, tmp_path, monkeypatch, make):
    given = []
    act = EnvWorker.act

    def noted(self, num_steps, version, weights, *rest):
        given.append((version, None if weights is None else weights.keys()))
        return act(self, num_steps, version, weights, *rest)

    monkeypatch.setattr(EnvWorker, "act", noted)
    runner = make([*short, ASYNC], tmp_path / "run")
    runner.loop.reset(0)
    for _ in range(2):
        runner.loop.advance(0.0)
    versions = [version for version, _ in given]
    assert versions == sorted(versions) and versions[-1] > 0
    for before, (version, keys) in zip([None, *versions], given, strict=False):
        assert keys == (None if version == before else {"actor", "encoder"})


# Bounds


@pytest.mark.parametrize(
    ("slow", "bound"),
    [
        ("env", 7),
        pytest.param("learner", 0, marks=pytest.mark.slow),
        pytest.param("env", 0, marks=pytest.mark.slow),
        pytest.param("learner", 7, marks=pytest.mark.slow),
    ],
)
def test_the_policy_lag_is_bounded(short, tmp_path, monkeypatch, slow, bound, make):
    more = [ASYNC, f"asynchronous.max_policy_lag={bound}", "learner.sac.updates_per_step=1"]
    if slow == "env":
        more.append("+env.train.init_params.seconds=0.003")
    else:
        delay(monkeypatch, 0.002)
    runner = make([*short, *more], tmp_path / "run")
    loop = runner.loop
    loop.steps_per_request, loop.max_pending_updates = (
        10,
        60.0,
    )  # larger than the bound allows without waiting
    loop.reset(0)
    metrics = [loop.advance(0.0).metrics for _ in range(2)]
    largest = max(entry["async/policy_lag_max"] for entry in metrics)
    assert largest <= bound
    assert all(entry["async/policy_lag_mean"] <= largest for entry in metrics)
    if slow == "env":  # the learner would run away
        assert largest == bound and sum(entry["async/lag_waits"] for entry in metrics) > 0
    assert loop.learner.num_updates > 500


def delay(monkeypatch, seconds):
    """Make updates slow."""
    update = SAC.update

    def slowly(self, *args):
        time.sleep(seconds)
        return update(self, *args)

    monkeypatch.setattr(SAC, "update", slowly)


def test_requests_are_cut_to_the_bound_so_that_nobody_waits(short, tmp_path, make):
    more = [ASYNC, "asynchronous.max_policy_lag=60", "learner.sac.updates_per_step=1"]
    runner = make([*short, *more, "+env.train.init_params.seconds=0.0005"], tmp_path / "run")
    assert runner.loop.steps_per_request == 10  # 60 updates are 20 steps of 3 environments, in 2 requests
    runner.loop.reset(0)
    metrics = [runner.loop.advance(0.0).metrics for _ in range(2)]
    assert 0 < metrics[1]["async/policy_lag_max"] <= 60
    assert sum(entry["async/lag_waits"] for entry in metrics) == 0


@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_slow_learner_holds_the_environments_back(short, tmp_path, monkeypatch, in_flight, make):
    delay(monkeypatch, 0.002)
    runner = make(
        [*short, ASYNC, f"asynchronous.max_in_flight={in_flight}", "asynchronous.steps_per_request=10"],
        tmp_path / "run",
    )
    loop, seen = runner.loop, []
    update = loop._update

    def watched():
        metrics = update()
        env = runner.env_worker.env.envs[0].unwrapped
        streaming = int(env._count[2]) - loop.streams[0].stored_steps
        seen.append((len(loop.streams[0].requests), streaming, loop._pending_updates))
        return metrics

    loop._update = watched
    loop.reset(0)
    for _ in range(2):
        loop.advance(0.0)
    requests, streaming, owed = (max(column) for column in zip(*seen, strict=True))
    assert requests == in_flight
    assert 0 < streaming <= in_flight * 10  # steps that were taken and are not stored
    assert owed <= loop.max_pending_updates + in_flight * 10 * 3 * 0.5 + 1
    assert len(seen) > 100


# Errors and ends


def test_an_error_of_an_environment_is_one_message(short, tmp_path, capsys):
    broken = [*short, ASYNC, "+env.train.init_params.fail_at=250"]
    reported = r"^env worker 0 failed: ValueError: the gripper is stuck .step 672; "
    with pytest.raises(WorkerError, match=reported):
        train(load_config("train", broken))
    assert threads() == []
    assert main(["train", *broken, f"runner.logger.log_path={tmp_path / 'again'}"]) == 1
    reported = capsys.readouterr().err.strip().splitlines()
    assert "env worker 0 failed: ValueError: the gripper is stuck" in reported[-1]
    assert not any("Traceback" in line for line in reported)


def test_what_reached_the_learner_before_an_error_can_be_resumed(short, tmp_path):
    with pytest.raises(WorkerError, match="the last good state is"):
        train(load_config("train", [*short, ASYNC, "+env.train.init_params.fail_at=250"]))
    (place,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(place.name[5:])
    assert step == 672  # 7 whole requests of 32 steps; the eighth failed on the way
    more = [f"runner.resume_dir={place}", f"runner.logger.log_path={tmp_path / 'resumed'}"]
    assert train(load_config("train", [*short, ASYNC, *more]))[1]["env_steps"] == 1539


def test_ctrl_c_ends_the_threads(short, tmp_path, monkeypatch):
    update = SAC.update

    def interrupted(self, *args):
        if self.num_updates == 50:
            raise KeyboardInterrupt
        return update(self, *args)

    monkeypatch.setattr(SAC, "update", interrupted)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train(load_config("train", [*short, ASYNC, "+env.train.init_params.seconds=0.002"]))
    assert threads() == [] and time.monotonic() - started < 240


@pytest.mark.parametrize(("owner", "part"), [(RunParts, "_make_loop"), (EmbodiedRunner, "_make_monitor")])
def test_a_run_that_cannot_be_set_up_leaves_no_threads(short, tmp_path, monkeypatch, owner, part):
    def broken(self):
        raise ConfigError("it does not fit")

    monkeypatch.setattr(owner, part, broken)
    with pytest.raises(ConfigError, match="it does not fit"):
        EmbodiedRunner(load_config("train", [*short, ASYNC]), tmp_path)
    assert threads() == []


def test_ppo_is_refused(short, tmp_path, make):
    with pytest.raises(ConfigError, match=r"asynchronous.enabled is for off-policy agents \(sac, td3, dqn\)"):
        make([*short, ASYNC, "learner.algorithm=ppo"], tmp_path / "run")


def test_the_switch_of_the_runner_is_understood():
    assert load_config("train", ["+runner.asynchronous=true"]).asynchronous.enabled


# Resuming


def test_a_resumed_run_continues_with_every_episode_counted_once(short, tmp_path, make, finished_short):
    folder, summary, _ = finished_short("async")
    first = min(int(item.name[5:]) for item in (folder / "checkpoints").iterdir())
    assert (first, summary["env_steps"]) == (1026, 1539)
    more = [
        f"runner.resume_dir={folder / 'checkpoints' / f'step_{first}'}",
        f"runner.logger.log_path={tmp_path / 'resumed'}",
    ]
    runner = make([*short, ASYNC, *more], tmp_path / "resumed")
    assert runner.run()["env_steps"] == 1539
    before = [entry for entry in lines(folder) if entry["step"] <= first]
    entries = before + lines(tmp_path / "resumed")
    # An iteration ends with whole requests, 6 of 32 steps of 3 environments; before a checkpoint on its mark.
    assert [entry["step"] for entry in entries if "async/policy_lag_max" in entry] == [576, 1026, 1539]
    # Episodes have 7 steps; environments begin score_all at the checkpoint, after 342 steps of each.
    assert sum(entry.get("env/episodes", 0) for entry in entries) == 3 * (342 // 7 + 171 // 7)
    held = steps_of(runner.loop.replay.parts[0])
    counts = np.concatenate([np.arange(1, 343), np.arange(1, 172)]).astype(np.float32)
    np.testing.assert_array_equal(held["env_rewards"], np.tile(counts[:, None], (1, 3)))
    assert held["truncated"][341].all()  # cut off by the checkpoint


def test_synchronous_and_asynchronous_runs_resume_each_other(short, tmp_path, finished_short):
    folder, *_ = finished_short("sync")
    more = [f"runner.resume_dir={folder}", "learner.total_steps=2000"]
    other, summary = train(
        load_config("train", [*short, ASYNC, *more, f"runner.logger.log_path={tmp_path / 'async'}"])
    )
    assert summary["env_steps"] == 2052
    more = [f"runner.resume_dir={other}", "learner.total_steps=2500"]
    _, summary = train(load_config("train", [*short, *more, f"runner.logger.log_path={tmp_path / 'sync'}"]))
    assert summary["env_steps"] == 2565


@pytest.fixture
def two_workers(monkeypatch):
    """Two env workers in this process, a thread each."""
    monkeypatch.setattr(ThreadEngine, "num_workers", lambda self, role: {"env": 2, "reward": 1}.get(role, 0))


@pytest.mark.usefixtures("two_workers")
def test_a_resumed_run_goes_on_with_its_draws_among_several_workers(short, tmp_path, make, caplog):
    settings = [*short, ASYNC, "env.train.num_envs=4", "learner.total_steps=1000"]
    runner = make(settings, tmp_path / "run")
    fresh = runner.loop.replay.rng.bit_generator.state
    runner.run()
    assert [len(part) > 100 for part in runner.loop.replay.parts] == [True, True]
    assert runner.loop.replay.rng.bit_generator.state != fresh
    place = max((tmp_path / "run" / "checkpoints").iterdir())
    resumed = make([*settings, f"runner.resume_dir={place}"], tmp_path / "resumed")
    resumed.start_or_resume()
    for _ in range(5):
        batches = [each.loop.replay.sample(64, gamma=0.9) for each in (runner, resumed)]
        np.testing.assert_array_equal(batches[0].rows, batches[1].rows)
        np.testing.assert_array_equal(batches[0].env_rewards, batches[1].env_rewards)
    assert "of an older version" not in caplog.text
    # What a checkpoint of before holds.
    state = resumed.loop.state_dict(tmp_path)
    del state["parts_rng"]
    resumed.loop.load_state_dict(state, tmp_path)
    assert "the checkpoint is of an older version" in caplog.text


def test_buffers_of_another_number_of_workers_are_refused(short, tmp_path, finished_short):
    folder, *_ = finished_short("async")
    place = tmp_path / "copy"
    shutil.copytree(max((folder / "checkpoints").iterdir()), place)
    (place / "replay.npz").rename(place / "replay_0.npz")
    more = [f"runner.resume_dir={place}", f"runner.logger.log_path={tmp_path / 'resumed'}"]
    with pytest.raises(DataError, match=r"another number of env workers: 1 now, but there is replay_0\.npz"):
        train(load_config("train", [*short, ASYNC, *more]))


@pytest.mark.slow
def test_one_buffer_for_all_is_not_taken_for_those_of_several_workers(short, tmp_path, request):
    settings = [*short, "env.train.num_envs=4", "learner.total_steps=600"]
    folder, _ = train(load_config("train", settings))  # on Ray too: synchronous env workers share a buffer
    request.getfixturevalue("two_workers")
    more = [ASYNC, f"runner.logger.log_path={tmp_path / 'parts'}"]
    with pytest.raises(DataError, match=r"2 env workers of an asynchronous run.*asynchronous\.enabled=false"):
        train(load_config("train", [*settings, *more, f"runner.resume_dir={folder}"]))
    parts, _ = train(load_config("train", [*settings, *more]))
    more = [f"runner.resume_dir={parts}", f"runner.logger.log_path={tmp_path / 'resumed'}"]
    with pytest.raises(DataError, match=r"asynchronously.*there is replay_0\.npz; a synchronous run counts"):
        train(load_config("train", [*settings, *more]))


@pytest.mark.parametrize("pace", [pytest.param([], marks=pytest.mark.slow), [ASYNC]])
def test_another_number_of_environments_is_refused_with_their_buffer(short, tmp_path, pace):
    settings = [*short, *pace, "learner.total_steps=600"]
    folder, _ = train(load_config("train", settings))
    more = [
        f"runner.resume_dir={folder}",
        "env.train.num_envs=2",
        f"runner.logger.log_path={tmp_path / 'more'}",
    ]
    with pytest.raises(
        DataError, match=r"3000 rows of 3 environments, this one 4500 of 2.*env.train.num_envs"
    ):
        train(load_config("train", [*settings, *more]))


# The learned reward


@pytest.mark.parametrize("mode", ["per_step", "terminal"])
def test_verdicts_belong_to_the_frames_of_their_steps(settings, tmp_path, mode, make):
    more = [f"reward.reward_mode={mode}", "reward.relabel_at=sampling", ASYNC]
    runner = make([*settings, *LEARNED, *more], tmp_path / "run")
    runner.loop.reset(0)
    iteration = runner.loop.advance(0.0)
    held = steps_of(runner.loop.replay.parts[0])
    prob = held["prob_success"]
    scored = np.isfinite(prob)
    done = held["terminated"] | held["truncated"]
    np.testing.assert_array_equal(scored, np.ones_like(done) if mode == "per_step" else done)
    fresh = runner.rewards.score({"base_camera": held["frames/base_camera"][scored]})
    np.testing.assert_allclose(fresh.prob_success, prob[scored], atol=1e-5)
    assert prob[scored].std() > 0
    watched = iteration.for_monitor
    np.testing.assert_array_equal(watched.prob_success, prob[: len(watched.prob_success)])
    for t, env in np.argwhere(scored)[::40]:
        np.testing.assert_array_equal(watched.frame(t, env), held["frames/base_camera"][t, env])
    assert watched.features.shape[0] == min(64, scored.sum())
    stored = runner.loop._stored[0]
    assert stored.reward_version == runner.rewards.facts.version


def test_a_verdict_that_takes_too_long_is_waited_for(settings, tmp_path, make, monkeypatch, caplog):
    real, slow = RewardManager.score_some, []

    def score_some(self, frames, start, stop):
        if not slow:
            slow.append(stop - start)
            time.sleep(1.0)
        return real(self, frames, start, stop)

    monkeypatch.setattr(RewardManager, "score_some", score_some)
    runner = make([*settings, *LEARNED, ASYNC, "reward.timeout_seconds=0.3"], tmp_path / "run")
    runner.loop.reset(0)
    runner.loop.advance(0.0)
    held = steps_of(runner.loop.replay.parts[0])["prob_success"]
    assert slow and len(held) and np.isfinite(held).all()
    assert "the reward model has given no answer for 0.3 s; still waiting" in caplog.text
    assert not runner.engine.restarts


def test_a_run_on_the_learned_reward_leaves_everything_behind(settings):
    folder, summary = train(load_config("train", [*settings, *LEARNED, ASYNC]))
    assert summary["reward"] == "learned (replace)" and summary["env_steps"] == 1024
    entries = lines(folder)
    for entry in entries:
        if "rollout/rewards" in entry:
            assert entry["rollout/rewards"] == entry["rollout/learned_rewards"]
            assert entry["rollout/rewards"] == pytest.approx(entry["reward/fire_rate"], abs=1e-6)
    assert any(0 < entry.get("reward/fire_rate", 0) < 1 for entry in entries)
    assert {"async/queue_seconds", "monitor/alarms", "eval/success_once"} <= set().union(*entries)
    for name in ("config.yaml", "summary.json", "report.html", "videos/eval_0.gif"):
        assert (folder / name).stat().st_size > 0
    assert threads() == []


# Learning


@pytest.mark.slow
def test_the_policy_is_as_good_as_a_synchronous_one(tmp_path):
    returns = {}
    for kind in (True, False):
        settings = [
            "env.train.id=Pendulum-v1",
            "env.eval.id=Pendulum-v1",
            "env.train.num_envs=1",
            "env.eval.num_envs=20",
            "learner.algorithm=sac",
            "learner.total_steps=12000",  # enough for whatever the pace of the threads makes of it
            "learner.eval_interval=1000",
            "learner.eval_episodes=20",
            "learner.stop_return=-200",  # a good policy has -150, random play -1200
            "learner.num_threads=1",
            "learner.network.hidden=[64,64]",
            "learner.network.activation=relu",
            "learner.sac.learning_starts=500",
            "learner.sac.batch_size=128",
            "learner.sac.actor_lr=1e-3",
            "learner.sac.critic_lr=1e-3",
            "learner.sac.alpha_lr=1e-3",
            f"asynchronous.enabled={kind}",
            "runner.logger.backends=[]",
            f"runner.logger.log_path={tmp_path / str(kind)}",
        ]
        folder, summary = train(load_config("train", settings))
        returns[kind] = summary["env_return"]
        lags = [entry["async/policy_lag_max"] for entry in lines(folder) if "async/policy_lag_max" in entry]
        assert bool(lags) == kind
    assert returns[True] > -300
    assert returns[True] > returns[False] - 100
