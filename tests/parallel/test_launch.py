"""Ranks of torch.distributed, started by Ray."""

import pytest

from guerdon.config import ClusterConfig
from guerdon.errors import ClusterError, GuerdonError
from guerdon.parallel.launch import launch_ranks
from tests.parallel.ranks import one_fails, total

pytestmark = pytest.mark.usefixtures("cluster")


def test_ranks_compute_together():
    answers = launch_ranks(total, 2, 10, threads=1)
    assert [item[:3] for item in answers] == [(21.0, 2, "0"), (21.0, 2, "1")]
    assert len({item[3] for item in answers}) == 2


def test_a_rank_that_is_killed_stops_the_others():
    with pytest.raises(ClusterError, match="rank 1 of 2 was lost: its process has gone"):
        launch_ranks(one_fails, 2, "killed", threads=1)


def test_a_rank_that_fails_stops_the_others():
    with pytest.raises(GuerdonError, match=r"reward worker \d failed: "):
        launch_ranks(one_fails, 2, "raises", threads=1)


def test_too_many_ranks_are_refused():
    with pytest.raises(ClusterError, match=r"asks for slot 63 of the cluster, which has 4"):
        launch_ranks(total, 64, 0)
    placed = ClusterConfig(component_placement={"reward": "0-2"})
    with pytest.raises(ClusterError, match="2 ranks are asked for, reward has 3 slots"):
        launch_ranks(total, 2, 0, cluster=placed)
