"""One update of SAC, ours and that of stable_baselines3, in alternation, beside its bare matrix products.

`python -m benchmarks.bench_sac_update [rounds]`; sampling from the replay buffer is part of an update. The
machine may be shared: seconds on a core are measured beside those that pass. A ratio is the median over pairs
of neighbours in time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import Result, report, silent
from guerdon.agents.networks import ObsSpec
from guerdon.agents.replay import ReplayBuffer
from guerdon.agents.sac import SAC
from guerdon.config import NetworkConfig, SACConfig

ROUNDS, IN_A_ROW, WARM_UP = 60, 4, 10
TRANSITIONS = 20_000
TARGET = 3.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes that both libraries get."""

    name: str
    state_size: int
    num_actions: int
    width: int = 256
    batch_size: int = 256


CASES = (
    Case(name="Pendulum", state_size=3, num_actions=1),
    Case(name="PickCube", state_size=42, num_actions=4),
    Case(name="PickCube, 2 x 64", state_size=42, num_actions=4, width=64),
)


class Spaces(gym.Env[NDArray[np.float32], NDArray[np.float32]]):
    """What stable_baselines3 wants to see of a task; it is never stepped."""

    def __init__(self, case: Case) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (case.state_size,))
        self.action_space = gym.spaces.Box(-1.0, 1.0, (case.num_actions,))


def transitions(case: Case) -> dict[str, NDArray[Any]]:
    """Random ones; episodes of 50 steps."""
    rng = np.random.default_rng(0)
    return {
        "obs": rng.standard_normal((TRANSITIONS + 1, case.state_size), np.float32),
        "actions": rng.uniform(-1.0, 1.0, (TRANSITIONS, case.num_actions)).astype(np.float32),
        "env_rewards": rng.standard_normal(TRANSITIONS, np.float32),
        "ended": np.arange(1, TRANSITIONS + 1) % 50 == 0,
    }


def ours(case: Case, layer_norm: bool = False) -> Callable[[], object]:
    """An update: sample, and learn."""
    network = NetworkConfig(hidden=(case.width, case.width), activation="relu", layer_norm=layer_norm)
    space = gym.spaces.Box(-1.0, 1.0, (case.num_actions,))
    spec = ObsSpec(state_size=case.state_size)
    learner = SAC(spec, space, SACConfig(batch_size=case.batch_size), network, seed=0)
    replay = ReplayBuffer(spec, space.shape, np.float32, 1, TRANSITIONS, seed=0)
    data = transitions(case)
    nothing = np.zeros(1, np.bool_)
    for t in range(TRANSITIONS):
        one = slice(t, t + 1)
        step = (data["obs"][one], data["actions"][one], data["env_rewards"][one])
        replay.add(*step, nothing, data["ended"][one], data["obs"][t + 1 : t + 2])

    def update() -> None:
        batch = replay.sample(case.batch_size, gamma=0.99)
        learner.update(batch.train_batch(batch.env_rewards))

    return update


def theirs(case: Case) -> Callable[[], object]:
    """The same of stable_baselines3, with its default settings but for the sizes."""
    from stable_baselines3 import SAC as OtherSAC

    kwargs = {"net_arch": [case.width, case.width], "activation_fn": torch.nn.ReLU}
    model = OtherSAC("MlpPolicy", Spaces(case), policy_kwargs=kwargs, buffer_size=TRANSITIONS, device="cpu")
    model.set_logger(silent())
    replay: Any = model.replay_buffer
    data = transitions(case)
    for t in range(TRANSITIONS):
        row, after = data["obs"][t : t + 1], data["obs"][t + 1 : t + 2]
        replay.add(
            row,
            after,
            data["actions"][t : t + 1],
            data["env_rewards"][t : t + 1],
            np.zeros(1),
            [{"TimeLimit.truncated": bool(data["ended"][t])}],
        )
    return lambda: model.train(gradient_steps=1, batch_size=case.batch_size)


def products(case: Case) -> Callable[[], object]:
    """The matrix products that no update can do without, in arrays that stay in the cache: a lower bound.

    A pass of a network is one of hidden layers and one of inputs, its gradient two of each, or one for the
    inputs alone. Hidden layers: 1 + 2 for the targets, 2 + 4 for the critics, 1 + 2 + 2 + 2 for the policy,
    16 together. Inputs: 1 + 2, 2 + 2, 1 + 2 + 1, and 2 for a few columns, which are left out: 11.
    """
    batch, width, inputs = case.batch_size, case.width, case.state_size + case.num_actions
    out = torch.empty(batch, width)
    values, hidden = torch.randn(batch, width), torch.randn(width, width)
    seen, first = torch.randn(batch, inputs), torch.randn(inputs, width)

    def multiply() -> None:
        for _ in range(16):
            torch.mm(values, hidden, out=out)
        for _ in range(11):
            torch.mm(seen, first, out=out)

    return multiply


def measure(
    actions: dict[str, Callable[[], object]], rounds: int
) -> dict[str, tuple[NDArray[np.floating], NDArray[np.floating]]]:
    """Of each: milliseconds that pass and those on a core, a mean over a few in a row for each round."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for action in actions.values():
        for _ in range(WARM_UP):
            action()
    for _ in range(rounds):
        for name, action in actions.items():
            wall, core = time.perf_counter(), time.process_time()
            for _ in range(IN_A_ROW):
                action()
            spent = time.perf_counter() - wall, time.process_time() - core
            times[name].append((1e3 * spent[0] / IN_A_ROW, 1e3 * spent[1] / IN_A_ROW))
    return {name: (np.array(rows)[:, 0], np.array(rows)[:, 1]) for name, rows in times.items()}


def compare(case: Case, threads: int, rounds: int) -> list[Result]:
    """Print all times and return the ratios."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    actions = {
        "ours": ours(case),
        "theirs": theirs(case),
        "products": products(case),
        "with layer norm": ours(case, layer_norm=True),
    }
    times = measure(actions, rounds)
    title = f"{case.name}, {threads} thread{'s' * (threads > 1)}"
    for name, (wall, core) in times.items():
        print(
            f"   {title}: {name:<16}{np.median(wall):8.2f} ms ({wall.min():.2f} at best), "
            f"on a core {np.median(core):.2f} ms ({core.min():.2f} at best)",
            flush=True,
        )
    results = []
    for column, what in enumerate(("time", "processor time")):
        ratio = float(np.median(times["theirs"][column] / times["ours"][column]))
        bound = float(np.median(times["theirs"][column] / times["products"][column]))
        what = f"{title}: {what}, theirs / ours (bound {bound:.1f})"
        results.append(Result(what=what, value=ratio, target=TARGET))
    return results


def run(rounds: int = ROUNDS) -> list[Result]:
    """All sizes on one thread, and that of PickCube on two."""
    results = [line for case in CASES for line in compare(case, 1, rounds)]
    return results + compare(CASES[1], 2, rounds)


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    sizes = {case.name: f"{case.state_size} + {case.num_actions}, 2 x {case.width}" for case in CASES}
    sys.exit(report("sac_update", {"rounds": rounds, "batch": CASES[0].batch_size, **sizes}, run(rounds)))
