"""What 8, 64 and 512 nodes would do: a discrete-event model of a run, fed with costs that `costs` measures.

A node has some env workers and one reward worker. A worker plays its share of the environments, its frames
are judged on its own node, and what the learner needs travels to the learner's node, whose network card takes
one message after the other. A synchronous run (PPO) waits for everybody, updates, and hands out new weights;
an asynchronous one (SAC) lets every worker go on with the weights that are there, and updates as often as the
data allows. The deviation between workers, the network card and a learner 100 times as fast are assumed. The
model knows nothing of lost workers.
"""

from __future__ import annotations

import heapq
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.costs import Costs, measure
from benchmarks.report import Result, report

NODES = (1, 8, 64, 512)


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
        """StepBatch in one message."""
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
            scored = judges[worker % shape.nodes].serve(ends[worker], shape.chunk * costs.judge)
            sent = card.serve(ends[worker], shape.chunk * costs.bytes_per_step / costs.bandwidth)
            arrived = max(arrived, scored, sent + costs.message)
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
            scored = judges[worker % shape.nodes].serve(now, shape.chunk * costs.judge)
            push(scored, "judged", worker)
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


def table(title: str, outcomes: dict[int, Outcome]) -> None:
    """Print a row for each number of nodes."""
    print(title)
    for nodes, outcome in outcomes.items():
        busy = ", ".join(f"{name} {share:.0%}" for name, share in outcome.busy.items())
        print(f"   {nodes:>4} nodes: {outcome.steps_per_second:>12,.0f} steps/s; busy: {busy}")


def checks(images: Costs, states: Costs) -> list[Result]:
    """The model against arithmetic, where arithmetic suffices."""
    free: dict[str, Any] = {"jitter": 0.0, "judge": 0.0, "insert": 0.0, "message": 0.0, "bandwidth": 1e30}
    shape = Shape(nodes=8)
    playing = replace(images, update=0.0, **free)
    ratio = synchronous(playing, shape).steps_per_second * playing.step / shape.workers
    learning = replace(states, step=0.0, **free)
    other = asynchronous(learning, shape).steps_per_second * learning.update
    return [
        Result(what="PPO's model over arithmetic, nothing but env workers", value=ratio, target=0.99),
        Result(what="SAC's model over arithmetic, nothing but the learner", value=other, target=0.99),
    ]


def run() -> list[Result]:
    """Measure, simulate, check."""
    images, states = measure()
    for name, costs in (("PPO on images", images), ("SAC on states", states)):
        print(f"   {name}: " + ", ".join(f"{key} {value:.3g}" for key, value in asdict(costs).items()))
    table("PPO, synchronous, one learner", {n: synchronous(images, Shape(nodes=n)) for n in NODES})
    fast = replace(images, update=images.update / 100)
    table(
        "the same, a learner 100 times as fast (as a GPU might be: assumed)",
        {n: synchronous(fast, Shape(nodes=n)) for n in NODES},
    )
    table("SAC, asynchronous, one learner", {n: asynchronous(states, Shape(nodes=n)) for n in NODES})
    few = replace(states, updates_per_step=0.01)
    table("the same, one update for 100 steps", {n: asynchronous(few, Shape(nodes=n)) for n in NODES})
    return checks(images, states)


if __name__ == "__main__":
    sys.exit(report("scaling", {"nodes": NODES, "cores": "8 a node, as this machine's"}, run()))
