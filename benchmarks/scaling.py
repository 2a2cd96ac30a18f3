"""What 8, 64 and 512 nodes would do: a discrete-event model of a run, fed with costs measured here and now.

A node has some env workers and one reward worker. A worker plays its share of the environments, its frames
are judged on its own node, and what the learner needs travels to the learner's node, whose network card takes
one message after the other. A synchronous run (PPO) waits for everybody, updates, and hands out new weights;
an asynchronous one (SAC) lets every worker go on with the weights that are there, and updates as often as the
data allows. The model knows nothing of lost workers.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.report import Result, report
from guerdon.config import LearnerConfig, NetworkConfig, PPOConfig, SACConfig
from guerdon.envs import TabletopVectorEnv
from guerdon.learn.networks import ObsSpec
from guerdon.learn.ppo import PPO
from guerdon.learn.replay import TrainBatch
from guerdon.learn.rollout import RolloutCollector
from guerdon.learn.sac import SAC

NODES = (1, 8, 64, 512)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, bytes and sizes."""

    step: float
    """One step of one environment with its frame, seconds on one core."""
    jitter: float = 0.1
    """Deviation of the time of a rollout between workers, as a share."""
    judge: float
    """Judging one frame on one core."""
    update: float
    """Learning from one transition of a rollout (PPO), or one update (SAC)."""
    insert: float = 2e-6
    """Taking one transition into the learner's memory."""
    bytes_per_step: int
    """What travels to the learner for one transition."""
    message: float = 1e-3
    """Overhead of a message between processes."""
    weight_bytes: int
    bandwidth: float = 1.25e9
    """Bytes per second of a network card: 10 Gb/s."""
    updates_per_step: float = 1.0
    """SAC: updates for one transition."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a run is laid out."""

    nodes: int
    env_workers: int = 7
    """On each node; one more core judges."""
    envs: int = 32
    """Of each env worker."""
    steps: int = 50
    """Of each environment in a rollout or a request."""

    @property
    def workers(self) -> int:
        """Env workers on all nodes."""
        return self.nodes * self.env_workers

    @property
    def chunk(self) -> int:
        """Transitions in one message."""
        return self.envs * self.steps


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a simulated run."""

    steps_per_second: float
    busy: dict[str, float]
    """Share of the time that each part works; the largest is the bottleneck."""


class Station:
    """Serves one job after another."""

    def __init__(self) -> None:
        self.free_at = self.busy = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """When a job that arrives at `now` is done."""
        self.free_at = max(now, self.free_at) + seconds
        self.busy += seconds
        return self.free_at


def synchronous(costs: Costs, shape: Shape, iterations: int = 20, seed: int = 0) -> Outcome:
    """PPO: everybody plays, frames are judged, all rollouts reach the learner, which updates."""
    rng, now = np.random.default_rng(seed), 0.0
    judges, card, learner = [Station() for _ in range(shape.nodes)], Station(), Station()
    playing = 0.0
    for _ in range(iterations):
        spread = card.serve(now, shape.nodes * costs.weight_bytes / costs.bandwidth)  # once to every node
        jitter = np.maximum(1.0 + costs.jitter * rng.standard_normal(shape.workers), 0.5)
        ends = spread + costs.message + shape.chunk * costs.step * jitter
        playing += float((ends - spread).sum())
        arrived = 0.0
        for worker in np.argsort(ends).tolist():
            judged = judges[worker % shape.nodes].serve(ends[worker], shape.chunk * costs.judge)
            sent = card.serve(ends[worker], shape.chunk * costs.bytes_per_step / costs.bandwidth)
            arrived = max(arrived, judged, sent + costs.message)
        total = shape.chunk * shape.workers
        now = learner.serve(arrived, total * (costs.update + costs.insert) + shape.workers * costs.message)
    return _outcome(shape, iterations * shape.chunk * shape.workers, now, playing, judges, card, learner)


def asynchronous(costs: Costs, shape: Shape, chunks: int | None = None, seed: int = 0) -> Outcome:
    """SAC: two requests of every worker are under way; the learner takes what comes and updates."""
    rng = np.random.default_rng(seed)
    judges, card, learner = [Station() for _ in range(shape.nodes)], Station(), Station()
    chunks = shape.workers * 20 if chunks is None else chunks
    playing, done, now = 0.0, 0, 0.0
    env_free = np.zeros(shape.workers)
    events: list[tuple[float, int, str, int]] = []
    number = 0

    def push(at: float, kind: str, worker: int) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (at, number, kind, worker))

    def play(at: float, worker: int) -> None:
        nonlocal playing
        jitter = max(1.0 + costs.jitter * float(rng.standard_normal()), 0.5)
        seconds = shape.chunk * costs.step * jitter
        playing += seconds
        env_free[worker] = max(at + costs.message, env_free[worker]) + seconds
        push(float(env_free[worker]), "played", worker)

    for worker in range(shape.workers):
        for _ in range(2):
            play(0.0, worker)
    while done < chunks:
        now, _, kind, worker = heapq.heappop(events)
        if kind == "played":
            judged = judges[worker % shape.nodes].serve(now, shape.chunk * costs.judge)
            push(judged, "judged", worker)
        elif kind == "judged":
            push(card.serve(now, shape.chunk * costs.bytes_per_step / costs.bandwidth), "arrived", worker)
        elif kind == "arrived":
            work = shape.chunk * (costs.insert + costs.updates_per_step * costs.update) + costs.message
            push(learner.serve(now, work), "learned", worker)
        else:
            done += 1
            play(card.serve(now, costs.weight_bytes / costs.bandwidth), worker)
    return _outcome(shape, done * shape.chunk, now, playing, judges, card, learner)


def _outcome(
    shape: Shape,
    steps: int,
    seconds: float,
    playing: float,
    judges: list[Station],
    card: Station,
    learner: Station,
) -> Outcome:
    busy = {
        "env workers": min(playing / (seconds * shape.workers), 1.0),
        "reward workers": min(sum(each.busy for each in judges) / (seconds * shape.nodes), 1.0),
        "network of the learner": min(card.busy / seconds, 1.0),
        "learner": min(learner.busy / seconds, 1.0),
    }
    return Outcome(steps_per_second=steps / seconds, busy=busy)


# Costs


def _median(function: Callable[[], object], count: int = 5) -> float:
    times = []
    for _ in range(count + 1):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))


def measure() -> tuple[Costs, Costs]:
    """Costs of PPO on two cameras, and of SAC on states, on one core of this machine."""
    torch.set_num_threads(1)
    cameras = ("base_camera", "wrist_camera")
    env = TabletopVectorEnv(32, obs_mode="rgb", cameras=cameras, autoreset_mode="SameStep")
    network = NetworkConfig(hidden=(256,), activation="relu")
    ppo = PPO(
        ObsSpec.of(env.single_observation_space),
        env.single_action_space,
        PPOConfig(num_steps=10, update_epochs=3, minibatch_size=160),
        network,
        seed=0,
    )
    collector = RolloutCollector(env, 10)
    collector.reset(0)
    step = _median(lambda: collector.collect(ppo)) / 320
    rollout = collector.collect(ppo)
    update = _median(lambda: ppo.update(rollout)) / 320
    weights = sum(item.nbytes for item in ppo.actor.parameters())
    judge = 1 / 2700  # an image of 64x64 by a ResNet10 in int8; `bench_scoring` measures it
    images = Costs(
        step=step, judge=judge, update=update, bytes_per_step=2 * 64 * 64 * 3 + 40, weight_bytes=weights
    )
    states = TabletopVectorEnv(32, autoreset_mode="SameStep")
    states.reset(seed=0)
    zeros = np.zeros((32, 4), np.float32)
    sac = SAC(
        ObsSpec.of(states.single_observation_space),
        states.single_action_space,
        SACConfig(),
        LearnerConfig().network,
        seed=0,
    )
    update = _median(lambda: sac.update(_batch(256)), 20)

    def step_and_show() -> None:
        states.step(zeros)
        states.render_frames()

    step = _median(step_and_show, 20) / 32
    weights = sac.actor.flat.nbytes
    return images, Costs(
        step=max(step, 3e-3 / 32),
        judge=judge,
        update=update,
        bytes_per_step=2 * 80 + 40,
        weight_bytes=weights,
    )


def _batch(size: int) -> TrainBatch:
    state = {"state": torch.randn(size, 20)}
    return TrainBatch(
        obs=state,
        actions=torch.rand(size, 4) * 2 - 1,
        training_rewards=torch.rand(size),
        next_obs=state,
        not_terminated=torch.ones(size),
        discount=torch.full((size,), 0.99),
    )


def table(title: str, outcomes: dict[int, Outcome]) -> None:
    """Print a row for each number of nodes."""
    print(title)
    for nodes, outcome in outcomes.items():
        busy = ", ".join(f"{name} {share:.0%}" for name, share in outcome.busy.items())
        print(f"   {nodes:>4} nodes: {outcome.steps_per_second:>12,.0f} steps/s; busy: {busy}")


def run() -> list[Result]:
    """Measure, check the model against arithmetic, simulate."""
    images, states = measure()
    print(f"   PPO on images: {images}\n   SAC on states: {states}")
    table("PPO, synchronous, one learner", {n: synchronous(images, Shape(nodes=n)) for n in NODES})
    eight = replace(images, update=images.update / 100)
    table(
        "the same, a learner 100 times as fast (a GPU)",
        {n: synchronous(eight, Shape(nodes=n)) for n in NODES},
    )
    table("SAC, asynchronous, one learner", {n: asynchronous(states, Shape(nodes=n)) for n in NODES})
    few = replace(states, updates_per_step=0.01)
    table("the same, one update for 100 steps", {n: asynchronous(few, Shape(nodes=n)) for n in NODES})
    free = replace(images, jitter=0.0, judge=0.0, update=0.0, insert=0.0, message=0.0, bandwidth=1e30)
    shape = Shape(nodes=8)
    ideal = shape.workers / free.step
    ratio = synchronous(free, shape).steps_per_second / ideal
    return [
        Result(what="model over arithmetic, nothing but env workers", value=ratio, target=0.99, at_least=True)
    ]


if __name__ == "__main__":
    sys.exit(report("scaling", {"nodes": NODES, "cores": "8 a node, as this machine's"}, run()))
