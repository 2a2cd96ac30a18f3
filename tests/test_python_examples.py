"""The examples in Python and the notebooks, with small numbers."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / "python" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plugin_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("surprise_reward", None)


def test_every_example_is_run_here():
    text = Path(__file__).read_text()
    assert [
        path.stem for path in (EXAMPLES / "python").glob("*.py") if f'load("{path.stem}")' not in text
    ] == []
    assert [path.name for path in (EXAMPLES / "notebooks").glob("*.ipynb") if path.name not in text] == []


@pytest.mark.slow
def test_own_environment_with_stable_baselines3(tmp_path):
    assert load("own_env_sb3").main(tmp_path, episodes=16, epochs=10, steps=1_500) >= 0.8


def test_a_loop_of_ones_own():
    assert load("own_loop").main(num_envs=4, num_steps=16, iterations=3) > 0


@pytest.mark.slow
def test_the_loop_of_di_engines_page_beside_a_reward_of_zero():
    main = load("manual_loop").main
    learned, control = main("gail"), main("zero")
    assert learned > control + 50


@pytest.mark.slow
def test_a_folder_of_pictures(tmp_path):
    assert load("picture_folder").main(tmp_path, count=60, epochs=6) > 0.9


@pytest.mark.slow
def test_gail_from_an_npz(tmp_path):
    assert load("gail_npz").main(tmp_path, episodes=5, steps=12_000) > 60


def test_a_plugin_package(plugin_path):
    assert load("plugin").main(steps=512, num_envs=2) >= 512


@pytest.mark.slow
def test_the_robot_simulator(tmp_path):
    assert load("robot_simulator").main(tmp_path, episodes=8) > 0.8


@pytest.mark.slow
def test_ray_on_two_processes():
    assert load("ray_two_processes").main(steps=400, num_envs=4) >= 400


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labels_to_reward.ipynb", "reward_to_policy.ipynb"])
def test_a_notebook(name, capsys):
    """Its cells one after another; the last line of each is shown as a notebook would show it."""
    cells = json.loads((EXAMPLES / "notebooks" / name).read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code"), (
        "notebooks are kept bare"
    )
    names = {"__name__": "__main__"}
    shown = []
    for text in code:
        exec(compile(text, name, "exec"), names)
        last = text.rstrip().splitlines()[-1]
        if last and not last.startswith((" ", ")", "assert", "import")) and "=" not in last.split("(")[0]:
            value = eval(last, names)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    assert len(shown) >= 5 and any(text.startswith("<b>Dataset</b>") for text in shown)
