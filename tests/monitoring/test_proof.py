"""The verdict of `guerdon prove`, on numbers that were made up."""

import json
from dataclasses import replace

import numpy as np
import pytest

from guerdon.core import strict_json
from guerdon.monitoring.proof import SeedResult, difference, judge, wilson
from guerdon.monitoring.proof_page import proof_page


def arm(*values, episodes=200, steps=1000, **more):
    """A result for each value, seeds 0, 1, ..."""
    return [
        SeedResult(
            seed=seed,
            episodes=episodes,
            success=value,
            env_return=10 * value,
            env_steps=steps,
            curve=((steps / 2, value / 2), (steps, value)) if steps else (),
            **more,
        )
        for seed, value in enumerate(values)
    ]


GOOD = {
    "start": arm(0.30, 0.32, 0.31, steps=0),
    "learned": arm(0.97, 0.96, 0.98),
    "off": arm(0.30, 0.28, 0.32),
    "shuffled": arm(0.25, 0.31, 0.28),
    "true": arm(0.98, 0.99, 0.97),
}


def reasons(proof):
    return [text for _, text in proof.reasons]


def test_wilson():
    # By hand: (0.5 + 1.92 / 10 +- 1.96 sqrt(0.25 / 10 + 0.96 / 100)) / (1 + 3.84 / 10)
    np.testing.assert_allclose(wilson(5, 10), (0.2366, 0.7634), atol=1e-4)
    np.testing.assert_allclose(wilson(0, 20), (0.0, 0.1611), atol=1e-4)
    np.testing.assert_allclose(wilson(20, 20), (0.8389, 1.0), atol=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_the_interval_of_a_difference_has_both_kinds_of_chance():
    one, other = arm(0.8, 0.8, 0.8), arm(0.3, 0.3, 0.3)
    found = difference(one, other, "success")
    assert found.value == pytest.approx(0.5)
    # Seeds that agree leave the chance of episodes alone: two binomials of 600 each.
    spread = 1.96 * np.sqrt((0.8 * 0.2 + 0.3 * 0.7) / 600)
    assert found.low == pytest.approx(0.5 - spread, abs=0.005)
    assert found.high == pytest.approx(0.5 + spread, abs=0.005)
    apart = difference(arm(0.6, 0.8, 1.0), other, "success")
    assert apart.value == pytest.approx(0.5)
    assert apart.high - apart.low > 2 * (found.high - found.low)


def test_arms_are_compared_seed_by_seed():
    both = difference(arm(0.2, 0.5, 0.8), arm(0.1, 0.4, 0.7), "success")
    assert both.value == pytest.approx(0.1) and both.low > 0  # though seeds differ by much more
    assert difference(arm(0.2, 0.5), arm(0.1), "success").value == pytest.approx(0.1)
    assert difference(arm(0.5), [], "success") is None


def test_a_reward_that_did_it():
    proof = judge(GOOD)
    assert proof.level == "good" and proof.measure == "success"
    assert proof.verdict.startswith(
        "The learned reward took success from 31% to 97% (95% interval of the gain"
    )
    assert proof.verdict.endswith(
        "points); without it the same training gave 30%; with its verdicts shuffled 28%; "
        "the true reward gives 98%."
    )
    assert 0.6 < proof.differences["start"].low < 0.66 < proof.differences["start"].high < 0.72
    assert proof.arms["learned"]["episodes"] == 600
    assert json.loads(json.dumps(proof.to_plain()))["arms"]["off"]["mean"] == pytest.approx(0.3)


def test_a_gain_that_the_controls_have_too_is_not_the_rewards():
    proof = judge({**GOOD, "off": arm(0.97, 0.95, 0.98)})
    assert proof.level == "bad"
    assert "does not clearly beat the same training without it" in reasons(proof)[0]
    assert any("gains 66 points on the start by itself" in text for text in reasons(proof))
    proof = judge({**GOOD, "shuffled": arm(0.97, 0.97, 0.97)})
    assert proof.level == "bad" and "shuffled verdicts" in reasons(proof)[0]


def test_no_gain():
    proof = judge({**GOOD, "learned": arm(0.31, 0.30, 0.33)})
    assert proof.level == "bad" and proof.verdict.startswith("No gain from the learned reward is shown")
    worse = judge({**GOOD, "learned": arm(0.1, 0.1, 0.1)})
    assert any("worse than its start" in text for text in reasons(worse))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"start": arm(0.96, 0.95, 0.97, steps=0)}, "The start leaves only 4 points to gain"),
        ({"start": arm(0.3), "learned": arm(0.97)}, "1 seed(s) cannot show"),
        ({"off": []}, "The arm off was not run: no time."),
        ({"off": arm(0.3, 0.3, 0.3, steps=400)}, "its budget is not the same"),
        ({"true": arm(1.0, 1.0, 1.0)}, "The true reward does better by"),
        ({"learned": arm(0.97, 0.97, 0.97, alarms=("drift",))}, "alarms in the learned arm: drift"),
        ({"learned": arm(0.97, 0.97, 0.97, stopped="by hand")}, "ended early: by hand"),
        ({"learned": arm(0.9, 0.9, 0.9, episodes=20)}, "20 evaluation episodes are few"),
    ],
)
def test_what_cannot_be_concluded_is_said(change, says):
    proof = judge({**GOOD, **change}, {"off": "no time"})
    assert proof.level == "care"
    assert any(says in text for text in reasons(proof)), reasons(proof)


def test_without_success_returns_are_compared():
    unknown = {
        name: [replace(each, success=None, episodes=9) for each in results] for name, results in GOOD.items()
    }
    proof = judge(unknown)
    assert proof.measure == "return" and proof.level == "care"
    assert proof.differences["start"].value == pytest.approx(6.6)
    assert "took the return from 3.1 to 9.7" in proof.verdict
    assert "does not tell success" in " ".join(reasons(proof))
    assert "<svg" in proof_page(proof, "a run")


def test_the_interval_of_returns_is_students():
    found = difference(arm(0.3, 0.4, 0.8), arm(0.1, 0.1, 0.1), "return")  # differences 2, 3 and 7
    half = 4.303 * np.sqrt(7 / 3)  # their variance is 7
    np.testing.assert_allclose((found.value, found.low, found.high), (4, 4 - half, 4 + half), rtol=1e-5)
    more = difference(arm(*np.linspace(0, 1, 21)), arm(*[0] * 21), "return")
    assert more.high - more.value == pytest.approx(
        2.086 * np.std(np.linspace(0, 10, 21), ddof=1) / 21**0.5, rel=0.002
    )


def test_the_return_of_a_single_seed_shows_nothing():
    alone = {name: [replace(results[0], success=None)] for name, results in GOOD.items()}
    proof = judge(alone)
    assert proof.level == "bad" and proof.verdict.startswith("No gain from the learned reward is shown")
    assert json.loads(strict_json.dumps(proof.to_plain()))["differences"]["start"]["low"] is None


def test_the_page_has_a_curve_and_a_band_for_every_arm():
    page = proof_page(judge(GOOD), "ppo on <a task>")
    assert "ppo on &lt;a task&gt;" in page and "The learned reward took success from 31% to 97%" in page
    for name in ("learned", "off", "shuffled", "true"):
        assert f'<polyline class="arm arm-{name}"' in page and f'<polygon class="band arm-{name}"' in page
    assert '<polyline class="arm arm-start"' in page
    assert page.count("seed 2") == 5
