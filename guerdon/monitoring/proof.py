"""What the learned reward did, from a run and its controls: intervals, a verdict, and what stays open.

An arm is one training setting with several seeds. Success is counted by episode; its interval is Wilson's.
Differences between arms are bootstrapped over seeds and, within a seed, over episodes. Where the environment
does not tell success, the mean return of each seed is compared instead, over seeds alone, by Student's
interval: among three seeds a bootstrap finds a gain in one of eight comparisons where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.monitoring.page import Level, Reason, worst_first

ARMS = ("start", "learned", "off", "shuffled", "true")
"""In the order in which they are shown."""
Z = 1.959964
"""Of a 95% interval."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The same of Student's distribution with 1, 2, ... degrees of freedom."""
DRAWS = 10_000
MIN_SEEDS = 3
MIN_EPISODES = 50
MIN_ROOM = 0.1
"""Share of episodes that the start must leave to be won."""
NEAR = 0.1
"""A control within this distance of the start has not moved."""


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """The end of one run."""

    seed: int
    episodes: int
    """Of the last evaluation."""
    success: float | None
    """Share of them; None where the environment does not tell."""
    env_return: float
    env_steps: int = 0
    curve: tuple[tuple[float, float], ...] = ()
    """(env steps, success or return) of every evaluation."""
    alarms: tuple[str, ...] = ()
    stopped: str | None = None
    seconds: float = 0.0


Results = Mapping[str, Sequence[SeedResult]]
"""Arm -> a result for each seed."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of two arms, with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a run and its controls show."""

    measure: str
    """`success` or `return`."""
    level: Level
    verdict: str
    """One sentence."""
    reasons: tuple[Reason, ...]
    """What supports the verdict, and what cannot be concluded; the worst first."""
    arms: dict[str, dict[str, Any]]
    """Arm -> `mean`, `low`, `high`, `episodes`, `seeds`."""
    differences: dict[str, Difference]
    """Another arm -> how much higher `learned` is."""

    def to_plain(self) -> dict[str, Any]:
        """For `prove.json`."""
        return asdict(self)


def wilson(successes: float, episodes: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson, 1927)."""
    if episodes < 1:
        return 0.0, 1.0
    share, spread = successes / episodes, Z * Z / episodes
    middle = share + spread / 2
    half = Z * math.sqrt(share * (1 - share) / episodes + spread / (4 * episodes))
    return max((middle - half) / (1 + spread), 0.0), min((middle + half) / (1 + spread), 1.0)


def difference(one: Sequence[SeedResult], other: Sequence[SeedResult], measure: str) -> Difference | None:
    """How much higher `one` is, in seeds that both have; None if there is no such seed."""
    pairs = [(a, b) for a in one for b in other if a.seed == b.seed]
    if not pairs:
        return None
    if measure == "return":
        return _over_seeds(np.array([value_of(a, measure) - value_of(b, measure) for a, b in pairs]))
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(pairs), size=(DRAWS, len(pairs)))
    means, samples = [], []
    for side in zip(*pairs, strict=True):
        values = np.array([value_of(result, measure) for result in side])
        means.append(values.mean())
        counts = np.array([result.episodes for result in side])[drawn]
        samples.append((rng.binomial(counts, values[drawn]) / counts).mean(axis=1))
    low, high = np.percentile(samples[0] - samples[1], [2.5, 97.5])
    return Difference(value=float(means[0] - means[1]), low=float(low), high=float(high))


def _over_seeds(values: NDArray[np.float64]) -> Difference:
    """The mean of differences [n], one of each seed, with Student's interval; one seed has no bounds."""
    mean, degrees = float(values.mean()), len(values) - 1
    if not degrees:
        return Difference(value=mean, low=-math.inf, high=math.inf)
    half = _student(degrees) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Difference(value=mean, low=mean - half, high=mean + half)


def _student(degrees: int) -> float:
    """How far a 95% interval reaches, in standard errors; beyond the table by Cornish and Fisher's series."""
    if degrees <= len(STUDENT):
        return STUDENT[degrees - 1]
    return Z + (Z**3 + Z) / (4 * degrees) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * degrees**2)


def value_of(result: SeedResult, measure: str) -> float:
    """What a result is compared by."""
    return result.env_return if measure == "return" or result.success is None else result.success


def judge(results: Results, left_out: Mapping[str, str] | None = None) -> Proof:
    """Compare the arms.

    Args:
        results: has `start` and `learned`; any of the controls may be missing.
        left_out: arm -> why it was not run.
    """
    known = all(result.success is not None for arm in results.values() for result in arm)
    measure = "success" if known else "return"
    arms = {name: _summary(results[name], measure) for name in ARMS if results.get(name)}
    learned, others = results["learned"], [name for name in arms if name != "learned"]
    found = {name: difference(learned, results[name], measure) for name in others}
    differences = {name: each for name, each in found.items() if each is not None}
    reasons = [
        *_gain(differences, arms, measure),
        *_controls(differences, arms, measure),
        *_limits(results, arms, measure, left_out or {}),
    ]
    reasons = worst_first(reasons)
    return Proof(
        measure=measure,
        level=reasons[0][0],
        verdict=_sentence(arms, differences, measure),
        reasons=tuple(reasons),
        arms=arms,
        differences=differences,
    )


def _summary(results: Sequence[SeedResult], measure: str) -> dict[str, Any]:
    values = [value_of(result, measure) for result in results]
    mean, episodes = float(np.mean(values)), sum(result.episodes for result in results)
    interval = wilson(mean * episodes, episodes) if measure == "success" else (min(values), max(values))
    return {
        "mean": mean,
        "low": interval[0],
        "high": interval[1],
        "episodes": episodes,
        "env_steps": max(result.env_steps for result in results),
        "seeds": [asdict(result) for result in results],
    }


# In words


def _sentence(arms: Mapping[str, Any], differences: Mapping[str, Difference], measure: str) -> str:
    what = "success" if measure == "success" else "the return"
    learned, gain = shown(arms["learned"]["mean"], measure), differences.get("start")
    if gain is None:
        parts = [f"The learned reward gives {learned} {what}"]
    else:
        before, interval = shown(arms["start"]["mean"], measure), _interval(gain, measure)
        if gain.low > 0:
            parts = [
                f"The learned reward took {what} from {before} to {learned} "
                f"(95% interval of the gain {interval})"
            ]
        else:
            parts = [
                f"No gain from the learned reward is shown: {what} was {before} before and {learned} after "
                f"(95% interval of the change {interval})"
            ]
    words = {
        "off": "without it the same training gave",
        "shuffled": "with its verdicts shuffled",
        "true": "the true reward gives",
    }
    parts += [f"{words[name]} {shown(arms[name]['mean'], measure)}" for name in words if name in arms]
    return "; ".join(parts) + "."


def _gain(differences: Mapping[str, Difference], arms: Mapping[str, Any], measure: str) -> list[Reason]:
    gain = differences.get("start")
    if gain is None:
        return [("bad", "The policy before reinforcement learning was not measured.")]
    words = f"{_interval(gain, measure)} more than the start (95% interval)."
    if gain.low > 0:
        return [("good", f"With the learned reward the policy comes to {words}")]
    worse = "worse than" if gain.high < 0 else "not clearly better than"
    open_end = measure == "success" and gain.high >= 0 and 1.0 - arms["start"]["mean"] < MIN_ROOM
    return [("care" if open_end else "bad", f"The policy ends {worse} its start: {words}")]


def _controls(differences: Mapping[str, Difference], arms: Mapping[str, Any], measure: str) -> list[Reason]:
    """Whether the gain is the reward's: against runs whose reward carries nothing."""
    reasons: list[Reason] = []
    names = {"off": "the same training without it", "shuffled": "the same training with shuffled verdicts"}
    for name, words in names.items():
        lead = differences.get(name)
        if lead is None:
            continue
        interval = _interval(lead, measure)
        if lead.low > 0:
            reasons.append(("good", f"The learned reward gives {interval} more than {words}."))
        else:
            text = f"The learned reward does not clearly beat {words} ({interval}): the gain is not its own."
            reasons.append(("bad", text))
        moved = arms[name]["mean"] - arms["start"]["mean"] if "start" in arms else 0.0
        if measure == "success" and moved > NEAR:
            text = f"{words.capitalize()} gains {100 * moved:.0f} points on the start by itself."
            reasons.append(("care", text))
    behind = differences.get("true")
    if behind is not None and behind.high < 0:
        text = f"The true reward does better by {_interval(_negative(behind), measure)}."
        reasons.append(("care", text))
    return reasons


def _limits(
    results: Results, arms: Mapping[str, Any], measure: str, left_out: Mapping[str, str]
) -> list[Reason]:
    """What cannot be concluded."""
    reasons: list[Reason] = []
    seeds = min(len(results[name]) for name in ("start", "learned") if name in results)
    if seeds < MIN_SEEDS:
        text = f"{seeds} seed(s) cannot show how much training varies from seed to seed: run {MIN_SEEDS}."
        reasons.append(("care", text))
    few = min(result.episodes for arm in results.values() for result in arm)
    if few < MIN_EPISODES:
        reasons.append(("care", f"{few} evaluation episodes are few: intervals are wide."))
    room = 1.0 - arms["start"]["mean"] if "start" in arms else 1.0
    if measure == "return":
        reasons.append(("care", "The environment does not tell success; mean returns of seeds are compared."))
    elif room < MIN_ROOM:
        text = f"The start leaves only {100 * room:.0f} points to gain, whatever the reward."
        reasons.append(("care", text))
    for name in ("off", "shuffled", "true"):
        if name not in arms:
            why = left_out.get(name, "it was not asked for")
            reasons.append(("care" if name != "true" else "good", f"The arm {name} was not run: {why}."))
        elif arms[name]["env_steps"] < arms["learned"]["env_steps"]:
            steps = f"{arms[name]['env_steps']:,} env steps, learned {arms['learned']['env_steps']:,}"
            reasons.append(("care", f"The arm {name} had {steps}: its budget is not the same."))
    alarms = sorted({alarm for result in results["learned"] for alarm in result.alarms})
    if alarms:
        reasons.append(("care", f"The monitor raised alarms in the learned arm: {', '.join(alarms)}."))
    stopped = {result.stopped for result in results["learned"] if result.stopped}
    reasons += [("care", f"A run of the learned arm ended early: {why}.") for why in sorted(stopped)]
    return reasons


def shown(value: float, measure: str) -> str:
    """A value of an arm for people."""
    return f"{100 * value:.0f}%" if measure == "success" else f"{value:.4g}"


def _interval(given: Difference, measure: str) -> str:
    if measure == "success":
        return f"{100 * given.low:.0f} to {100 * given.high:.0f} points"
    return "-∞ to ∞" if math.isinf(given.low) else f"{given.low:.4g} to {given.high:.4g}"


def _negative(given: Difference) -> Difference:
    return Difference(value=-given.value, low=-given.high, high=-given.low)
