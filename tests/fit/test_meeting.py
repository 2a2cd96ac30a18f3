"""The meeting point of ranks is open to the address that it was given, and to no other."""

import os
from datetime import timedelta

import pytest

from guerdon.core.errors import WorkerError
from guerdon.fit.process_group import ProcessGroup, open_store
from tests.distributed.sockets import listening

TIMEOUT = timedelta(seconds=60)


def test_the_store_listens_on_its_own_address_alone():
    before = set(listening([os.getpid()]))
    host = open_store("127.0.0.1", 0, 2, True, TIMEOUT)
    assert set(listening([os.getpid()])) - before == {("127.0.0.1", host.port)}
    guest = open_store("127.0.0.1", host.port, 2, False, TIMEOUT)
    guest.set("greeting", "hello")
    assert host.get("greeting") == b"hello"


def test_who_opens_a_shared_store_again_gets_the_same():
    first = open_store("127.0.0.1", 0, None, True, TIMEOUT, shared=True)
    first.set("greeting", "hello")
    again = open_store("127.0.0.1", first.port, None, False, TIMEOUT, shared=True)
    assert again.get("greeting") == b"hello"


def test_an_address_of_another_machine_is_told():
    with pytest.raises(WorkerError, match=r"rank 0 of 2 did not meet the others at 192\.0\.2\.77:0"):
        ProcessGroup.join(rank=0, world_size=2, address="192.0.2.77", port=0, timeout_seconds=5.0)
