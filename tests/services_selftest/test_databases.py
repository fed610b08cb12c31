"""Each database fixture gives an empty, working database."""

import sqlalchemy as sa


def test_a_fresh_database_takes_a_table(database_url):
    """Each test must start from nothing, whatever the test before it left."""
    engine = sa.create_engine(database_url)
    with engine.begin() as connection:
        assert sa.inspect(connection).get_table_names() == []
        connection.execute(sa.text("CREATE TABLE t (x INTEGER)"))
        connection.execute(sa.text("INSERT INTO t VALUES (1)"))
    with engine.begin() as connection:
        assert connection.execute(sa.text("SELECT x FROM t")).scalar() == 1
    engine.dispose()


def test_another_fresh_database_takes_a_table(database_url):
    """The same name is free again in the next test's database."""
    test_a_fresh_database_takes_a_table(database_url)
