"""Plugins are found by name without being imported, and say who brought them when they fail."""

import sys

import pytest

from guerdon.core.errors import ConfigError
from guerdon.core.plugins import load_plugins

GROUP = "guerdon.test_group"


def install(folder, distribution, entries, group=GROUP):
    """A distribution's metadata as pip writes it."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *entries, ""]))


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_group_without_plugins_is_empty():
    assert load_plugins(GROUP) == {}


def test_names_are_known_before_anything_is_imported(site):
    install(site, "acme-sim", ["acme = acme_sim:make", "later = acme_sim:absent"])
    (site / "acme_sim.py").write_text("def make():\n    return 'made'\n")
    plugins = load_plugins(GROUP)
    assert list(plugins) == ["acme", "later"]
    assert "acme_sim" not in sys.modules
    assert plugins["acme"].load()() == "made"
    with pytest.raises(ConfigError, match=r"'later' .*of acme-sim cannot be loaded: AttributeError"):
        plugins["later"].load()


def test_a_broken_plugin_names_its_distribution(site):
    install(site, "broken-dist", ["broken = broken_module:make"])
    (site / "broken_module.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(ConfigError, match=r"broken-dist cannot be loaded: .*a_module_that_is_not_there"):
        load_plugins(GROUP)["broken"].load()


def test_a_name_of_two_distributions_is_refused_when_it_is_used(site):
    install(site, "first-dist", ["twice = json:dumps"])
    install(site, "second-dist", ["twice = json:loads"])
    with pytest.raises(ConfigError, match=r"first-dist.*second-dist|second-dist.*first-dist"):
        load_plugins(GROUP)["twice"].load()
