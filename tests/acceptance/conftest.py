"""The cluster of processes that a test starts, on a pair of database and broker."""

import pytest

from tests.acceptance.cluster import Cluster, make_pair


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
