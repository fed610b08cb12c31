"""The proxy's filters find a COMMIT in what real drivers send."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from tests.services import COMMIT, TCPProxy, cut_before, hold, lose_answer

DATABASES = [
    pytest.param("postgresql", marks=pytest.mark.postgresql),
    pytest.param("mariadb", marks=pytest.mark.mariadb),
]


@pytest.fixture(params=DATABASES)
def through_proxy(request):
    """An engine through a proxy, the proxy, and a count of rows that goes past it."""
    server = request.getfixturevalue(request.param)
    url = request.getfixturevalue(f"{request.param}_url")
    direct = sa.create_engine(url, poolclass=sa.NullPool)

    def count():
        with direct.connect() as connection:
            return connection.execute(sa.text("SELECT COUNT(*) FROM t")).scalar()

    with direct.begin() as connection:
        connection.execute(sa.text("CREATE TABLE t (x INTEGER)"))
    with TCPProxy(sa.make_url(url).port) as proxy:
        database = sa.make_url(url).database
        engine = sa.create_engine(server.url(database, port=proxy.port), poolclass=sa.NullPool)
        yield engine, proxy, count


def insert(engine):
    """Insert one row in a transaction of its own."""
    with engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO t VALUES (1)"))


def test_a_connection_cut_before_commit_leaves_nothing(through_proxy):
    """The server never saw the COMMIT: it rolls back."""
    engine, proxy, count = through_proxy
    proxy.filter = cut_before(COMMIT)
    with pytest.raises(sa.exc.OperationalError):
        insert(engine)
    assert count() == 0
    insert(engine)
    assert count() == 1, "once is enough"


def test_a_lost_answer_to_commit_leaves_the_row(through_proxy):
    """The client gets the same error as above, and the row is there: it cannot know."""
    engine, proxy, count = through_proxy
    proxy.filter = lose_answer(COMMIT)
    with pytest.raises(sa.exc.OperationalError):
        insert(engine)
    assert count() == 1


def test_a_held_commit_is_late_and_not_lost(through_proxy):
    """What a frozen process or a slow network does to a write that was already checked."""
    engine, proxy, count = through_proxy
    proxy.filter = hold(COMMIT)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(insert, engine)
        assert proxy.holding.wait(10)
        assert count() == 0
        proxy.resume()
        writing.result(10)
    assert count() == 1
