"""The public names of `import guerdon as gd`: few, lazy, documented."""

import inspect
import subprocess
import sys

import pytest

import guerdon as gd

NAMES = [
    "Agent", "Card", "DQN", "Dataset", "PPO", "RLPD", "Reward", "SAC", "TD3", "check_reward_model", "collect",
    "fit_reward", "load_agent", "load_reward", "prove", "read", "reward_model", "wrap",
]  # fmt: skip
"""What is not in it is private."""


def test_the_list_of_public_names():
    assert sorted(gd.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(gd))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_and_documented(name):
    found = getattr(gd, name)
    assert callable(found)
    doc = inspect.getdoc(found)
    assert doc and len(doc.splitlines()[0]) > 20
    public = [item for item in vars(found) if not item.startswith("_")] if inspect.isclass(found) else []
    for item in public:
        if callable(getattr(found, item)) or isinstance(vars(found)[item], property):
            assert inspect.getdoc(getattr(found, item)), f"{name}.{item} has no docstring"


def test_collect_shows_its_arguments():
    assert list(inspect.signature(gd.collect).parameters)[:4] == ["env", "policy", "successes", "failures"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'fit_rewards'"):
        gd.fit_rewards  # noqa: B018


def test_import_is_quick():
    code = "import time; t = time.process_time(); import guerdon; print(time.process_time() - t)"
    seconds = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    assert seconds < 0.3


def test_collect_is_a_function_and_the_module_of_its_classes():
    code = (
        "import guerdon as gd; before = callable(gd.collect); import guerdon.collect; "
        "from guerdon.collect import RewardDataCollector; import sys; "
        "print(before, callable(gd.collect), gd.collect.RewardDataCollector is RewardDataCollector, "
        "'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["True", "True", "True", "False"], result.stderr
