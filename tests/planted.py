"""A pytest plugin that takes the reward away from under the tests of outcomes: each of them has to fail.

`--planted off` or `--planted shuffled` runs the tests marked `outcome`, and those alone. Every run in them
that would be on a learned reward has none, or one that is permuted among the steps of a batch; their own
controls stay as they are. A test that passes all the same proves nothing, and is reported as a failure; one
that fails by an assertion is reported as `xfailed`, with the numbers that it saw.
"""

from dataclasses import replace
from functools import wraps

import numpy as np
import pytest

KINDS = ("off", "shuffled")


def pytest_addoption(parser):
    parser.addoption("--planted", choices=KINDS, help="tests marked outcome on a reward that says nothing")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("planted"):
        return
    others = [item for item in items if not item.get_closest_marker("outcome")]
    items[:] = [item for item in items if item.get_closest_marker("outcome")]
    config.hook.pytest_deselected(items=others)
    for item in items:
        item.add_marker(pytest.mark.xfail(strict=True, raises=AssertionError))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around what makes it an expected failure
def pytest_runtest_makereport(item, call):
    """What fails before the test itself has nothing to do with its reward."""
    report = yield
    if item.config.getoption("planted") and call.when != "call" and hasattr(report, "wasxfail"):
        del report.wasxfail
        report.outcome = "failed"
    return report


@pytest.fixture(autouse=True, scope="session")
def planted_reward(request):
    """Takes the reward away if that was asked for; in this process and in the arms of `prove`."""
    kind = request.config.getoption("planted")
    if not kind:
        yield
        return
    from guerdon.integrations import scoring
    from guerdon.training import arms
    from guerdon.training.trainer import EmbodiedRunner

    begin, given = EmbodiedRunner.__init__, scoring.learned_rewards

    @wraps(begin)
    def planted(self, config, *more, **named):
        if config.reward.control == "none":
            config = replace(config, reward=replace(config.reward, control=kind))
        begin(self, config, *more, **named)

    draw = np.random.default_rng(0)

    def in_wrappers(*more):
        learned = given(*more)
        return np.zeros_like(learned) if kind == "off" else draw.permutation(learned)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbodiedRunner, "__init__", planted)
        patch.setattr(scoring, "learned_rewards", in_wrappers)
        patch.setitem(arms.CONTROLS, "learned", kind)
        yield
