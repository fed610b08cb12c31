"""Flushes on real brokers: what they promise, and that every wait has an end."""

import ssl
import time

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_lease.publish import FLUSH, Publisher, Undelivered, said
from tests.integration.beats import Cluster
from tests.services import TCPProxy

QUEUE = "flushed"
COLUMNS = ("entry", "state", "reason")


def publisher(url, timeout=2.0):
    """Return a publisher for a broker, and its app."""
    app = Celery(broker=url, set_as_current=False)
    app.conf.broker_connection_timeout = timeout
    return app, Publisher(
        lambda options: app.connection_for_write(transport_options=options),
        app.amqp.Producer,
        timeout=timeout,
    )


def port_of(url):
    """Return the port in a broker's URL."""
    return int(url.rsplit(":", 1)[1].split("/")[0])


def send(producer, *bodies, queue=QUEUE, **options):
    """Publish some messages."""
    declare = [Queue(queue, Exchange(""), routing_key=queue)]
    for body in bodies:
        producer.publish(body, routing_key=queue, declare=declare, **options)


def received(app, queue=QUEUE):
    """Take all messages from the queue; return their bodies."""
    bodies = []
    with app.connection_for_read() as connection:
        simple = connection.SimpleQueue(queue)
        while True:
            try:
                message = simple.get(timeout=0.3)
            except simple.Empty:
                return bodies
            message.ack()
            bodies.append(message.payload)


@pytest.fixture(
    params=[
        pytest.param("redis", marks=pytest.mark.redis),
        pytest.param("rabbitmq", marks=pytest.mark.rabbitmq),
    ]
)
def broker_url(request):
    """The URL of an empty broker, of each kind in turn."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def proxied(broker_url):
    """A publisher behind a proxy; the app beside it reaches the broker."""
    with TCPProxy(port_of(broker_url)) as proxy:
        url = broker_url.replace(f":{port_of(broker_url)}", f":{proxy.port}")
        _, through = publisher(url)
        app, _ = publisher(broker_url)
        yield proxy, through, app
        through.close()


def test_after_a_flush_the_broker_has_the_messages_in_order(broker_url):
    """That is when runs are marked as published."""
    app, broker = publisher(broker_url)
    bodies = [{"n": each} for each in range(FLUSH * 2 + 1)]

    with broker.flush() as producer:
        send(producer, *bodies)
    broker.close()

    assert received(app) == bodies


def test_a_connection_that_was_dropped_is_made_again(broker_url):
    """A flush that fails costs its connection, not the next flush."""
    app, broker = publisher(broker_url)
    with broker.flush() as producer:
        send(producer, "one")
    broker.close()

    with broker.flush() as producer:
        send(producer, "two")

    assert received(app) == ["one", "two"]
    broker.close()


def test_a_broker_that_refuses_is_told_at_once(proxied):
    """The stock scheduler would try a hundred times, in its loop."""
    proxy, broker, _ = proxied
    proxy.refuse()
    began = time.monotonic()

    with pytest.raises(Undelivered) as told, broker.flush():
        pass

    assert time.monotonic() - began < 4
    assert not told.value.turned_away


def test_a_broker_that_hangs_does_not_hang_us(proxied):
    """redis-py waits for ever by default, and so does a confirm without a timeout."""
    proxy, broker, app = proxied
    with broker.flush() as producer:
        send(producer, "before")
    proxy.hang()
    began = time.monotonic()

    with pytest.raises(Undelivered) as told, broker.flush() as producer:
        send(producer, "lost")

    assert time.monotonic() - began < 6
    assert not told.value.turned_away
    proxy.resume()
    with broker.flush() as producer:
        send(producer, "after")
    assert {"before", "after"} <= set(received(app))


def test_a_connection_cut_in_a_flush_is_noticed(proxied):
    """Either the client made it good, or the whole flush is sent again."""
    proxy, broker, app = proxied
    with broker.flush() as producer:
        send(producer, "before")

    try:
        with broker.flush() as producer:
            send(producer, "one")
            proxy.cut()
            send(producer, "two")
    except Undelivered:
        with broker.flush() as producer:
            send(producer, "one", "two")

    assert set(received(app)) == {"before", "one", "two"}


def test_an_error_about_a_message_is_not_about_the_broker(broker_url):
    """It belongs to one run; the flush is given up by whoever publishes, or goes on."""
    _, broker = publisher(broker_url)

    with broker.flush() as producer:
        with pytest.raises(Exception, match="serializable") as told:
            send(producer, object())
        assert not broker.is_delivery(told.value)
        assert not broker.is_delivery(KeyError("an unknown queue"))
    broker.close()


@pytest.mark.parametrize(
    "option",
    [{"compression": "zstandardd"}, {"delivery_mode": "Transient"}, {"serializer": "yamll"}],
    ids=str,
)
def test_a_wrong_option_is_the_messages_own_fault(broker_url, option):
    """Taken for the broker's, it would keep everything that is due for good."""
    app, broker = publisher(broker_url)

    with broker.flush() as producer:
        with pytest.raises(Exception, match=next(iter(option.values()))) as told:
            send(producer, "x", **option)
        assert not broker.is_delivery(told.value)
        send(producer, "a good one")
    broker.close()

    assert received(app) == ["a good one"]


@pytest.mark.redis
@pytest.mark.parametrize(
    "option", [{"compression": "zstandardd"}, {"delivery_mode": "Transient"}], ids=str
)
def test_an_entry_with_a_wrong_option_keeps_nothing_else_waiting(sqlite_url, redis_url, option):
    """On Redis such a KeyError comes wrapped, as if the broker were away."""
    cluster = Cluster(sqlite_url, broker_url=redis_url)
    schedule = {"bad": {"schedule": 60.0, "options": option}, "good": {"schedule": 60.0}}
    cluster.beat(schedule).at(seconds=61).go()

    found = {entry: (state, reason) for entry, state, reason in cluster.runs(*COLUMNS)}
    cluster.close()
    assert found["good"] == ("published", None)
    assert found["bad"][0] == "failed"
    assert "KeyError" in found["bad"][1]
    assert next(iter(option.values())) in found["bad"][1]


@pytest.mark.rabbitmq
def test_a_certificate_that_is_not_trusted_is_the_brokers_trouble(rabbitmq_url, monkeypatch):
    """It is an OSError, and a ValueError as well, as what is wrong with a message often is."""

    def untrusted(self, *args, **kwargs):
        raise ssl.SSLCertVerificationError(1, "certificate has expired")

    monkeypatch.setattr("amqp.transport._AbstractTransport.connect", untrusted)
    _, broker = publisher(rabbitmq_url)
    with pytest.raises(Undelivered, match="expired"), broker.flush():
        pass


def test_an_error_of_many_lines_is_one_line_of_a_log():
    """A driver's text goes on with its statement, which may hold a message's arguments."""
    assert said(ValueError("locked\n[SQL: INSERT secret]")) == "ValueError: locked"


def test_a_third_party_that_is_away_is_not_the_messages_fault(broker_url):
    """A result backend is asked before each message: its outage must lose no occurrence."""

    class ResultBackendAway(Exception):
        """What a driver raises that we have never heard of."""

    _, broker = publisher(broker_url)

    with pytest.raises(Undelivered) as told, broker.flush():
        raise ResultBackendAway

    assert (told.value.turned_away, told.value.lasting) == (True, False)


def test_a_queue_is_declared_once_for_each_connection(broker_url):
    """Again for a new connection: the broker may have been replaced. Never kept: auto-delete."""
    _, broker = publisher(broker_url)
    lasting = Queue("lasting", Exchange(""), routing_key="lasting")
    passing = Queue("passing", Exchange(""), routing_key="passing", auto_delete=True)
    asked = []

    def flush():
        with broker.flush() as producer:
            declared = producer.maybe_declare
            declare = declared._declare
            declared._declare = lambda entity, *args, **kwargs: (
                asked.append(entity.name) or declare(entity, *args, **kwargs)
            )
            for queue in (lasting, passing) * 2:
                producer.publish("message", routing_key=queue.name, declare=[queue])

    flush()
    assert asked == ["lasting", "passing", "passing"]
    broker.close()
    flush()
    assert asked.count("lasting") == 2
    broker.close()


@pytest.mark.rabbitmq
def test_a_channel_closed_in_a_flush_means_that_a_message_is_to_blame(rabbitmq_url):
    """An unknown exchange: AMQP tells it later, by closing the channel for all."""
    app, broker = publisher(rabbitmq_url)

    with pytest.raises(Undelivered) as told, broker.flush() as producer:
        send(producer, "good")
        producer.publish("bad", exchange="nowhere", routing_key="x")
        send(producer, "after")

    assert (told.value.turned_away, told.value.lasting) == (True, True)
    with broker.flush() as producer:
        send(producer, "again")
    assert received(app)[-1] == "again"
    broker.close()


@pytest.mark.rabbitmq
def test_a_message_that_amqp_cannot_write_is_to_blame_itself(rabbitmq_url):
    """amqp calls it an error of the connection: taken for that, nothing would go out any more."""
    app, broker = publisher(rabbitmq_url)

    with pytest.raises(Undelivered) as told, broker.flush() as producer:
        send(producer, "bad", headers={"tags": {1, 2}})

    assert (told.value.turned_away, told.value.lasting) == (True, True)
    with broker.flush() as producer:
        send(producer, "good")
    assert received(app) == ["good"]
    broker.close()


@pytest.mark.rabbitmq
def test_a_refused_message_is_not_taken_for_delivered(rabbitmq_url):
    """A full queue nacks: without the confirm the occurrence would be lost for good."""
    _, broker = publisher(rabbitmq_url)
    full = Queue(
        "full", queue_arguments={"x-max-length": 1, "x-overflow": "reject-publish"}, durable=True
    )

    receipts = []
    with pytest.raises(Undelivered) as told, broker.flush() as producer:
        for body in ("one", "two", "three"):
            producer.publish(body, routing_key="full", declare=[full])
            receipts.append(broker.receipt())

    assert (told.value.turned_away, told.value.lasting) == (True, False)
    assert [taken() for taken in receipts] == [True, False, False]
    broker.close()


@pytest.mark.redis
def test_a_message_in_a_pipeline_is_not_known_to_be_with_the_broker(redis_url):
    """It goes out at the end of its flush, from kombu 5.7 on; before that at once."""
    _, broker = publisher(redis_url)
    with broker.flush() as producer:
        send(producer, "one")
        taken = broker.receipt()
        deferred = hasattr(producer, "batch")

    assert taken() is not deferred
    broker.close()


def test_not_every_queue_is_remembered_as_declared(monkeypatch):
    """A router may make a queue for each message."""
    monkeypatch.setattr("celery_lease.publish._QUEUES", 3)
    _, broker = publisher("memory://")
    with broker.flush() as producer:
        for each in range(10):
            send(producer, each, queue=f"queue-{each}")
        remembered = producer.maybe_declare._known

    assert 0 < len(remembered) <= 3
    broker.close()


@pytest.mark.rabbitmq
def test_a_broker_short_of_memory_is_not_sent_a_message_again_and_again(rabbitmq, rabbitmq_url):
    """It reads what it was sent when it has memory again, from dropped connections too.

    Nobody refuses the copies of a plain task, and an alarm can last for hours.
    """
    app, broker = publisher(rabbitmq_url, timeout=1.0)
    with broker.flush() as producer:
        send(producer, "before")

    with rabbitmq.alarm():
        for _ in range(4):
            with pytest.raises(Undelivered) as told, broker.flush() as producer:
                send(producer, "once")
            assert not told.value.turned_away
    with broker.flush() as producer:
        send(producer, "after")

    assert received(app) == ["before", "once", "after"]
    broker.close()


@pytest.mark.rabbitmq
def test_confirms_are_waited_for_once_a_flush(rabbitmq_url):
    """One round trip for each message would be three times as slow."""
    _, broker = publisher(rabbitmq_url)
    with broker.flush() as producer:
        send(producer, "one")
        confirms = broker._confirms
        waited = []
        wait = confirms.wait
        confirms.wait = lambda timeout: waited.append(len(confirms._waiting)) or wait(timeout)
        send(producer, *range(50))

    assert len(waited) == 1
    assert confirms._waiting == set()
    broker.close()


@pytest.mark.rabbitmq
def test_a_broker_that_is_asked_for_confirms_one_by_one_is_not(rabbitmq_url):
    """The user's own ``confirm_publish`` is honoured, by the flush."""
    app, broker = publisher(rabbitmq_url)
    app.conf.broker_transport_options = {"confirm_publish": True}

    with broker.flush() as producer:
        send(producer, "one")
        assert producer.connection.connection.confirm_publish is False

    assert received(app) == ["one"]
    broker.close()
