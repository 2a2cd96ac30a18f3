import pytest

from tests.api.dot import save_untrained


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_untrained(tmp_path_factory.mktemp("api") / "model")
