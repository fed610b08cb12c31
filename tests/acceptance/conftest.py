"""The cluster of processes that a test starts, on a pair of database and broker."""

from pathlib import Path

import pytest

from tests.acceptance.cluster import Cluster, make_pair


def pytest_collection_modifyitems(items):
    """Give these tests more time: they wait for terms to expire, and the first one for servers."""
    for item in items:
        here = Path(__file__).parent in item.path.parents
        if here and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(240))


@pytest.fixture
def pair(request):
    """A fresh database and a fresh broker; `tests.acceptance.cluster.on` says which kinds."""
    return make_pair(request.param, request)


@pytest.fixture
def cluster(pair, tmp_path):
    """A cluster without processes; what the test starts ends with it."""
    cluster = Cluster(pair, tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
def ledger(cluster):
    """What happened, by plain SQL."""
    return cluster.ledger
