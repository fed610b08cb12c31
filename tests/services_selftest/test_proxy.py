"""Each verb of the proxy, against a small echo server."""

import contextlib
import socket
import socketserver
import statistics
import threading
import time

import pytest

from tests.services import TCPProxy, Verdict, cut_before, hold, lose_answer, wait_until


class Echo(socketserver.ThreadingTCPServer):
    """Answers each line with itself, and remembers what it got."""

    daemon_threads = True

    def __init__(self):
        self.seen = []
        super().__init__(("127.0.0.1", 0), EchoHandler)


class EchoHandler(socketserver.StreamRequestHandler):
    """One connection to the echo server."""

    def handle(self):
        """Answer until the client ends."""
        with contextlib.suppress(ConnectionResetError):
            for line in self.rfile:
                self.server.seen.append(line)
                self.wfile.write(line)


class Client:
    """A client that says lines and hears lines."""

    def __init__(self, proxy):
        self.sock = socket.create_connection(("127.0.0.1", proxy.port), timeout=5)
        self.file = self.sock.makefile("rb")

    def say(self, line):
        """Send, and do not wait."""
        self.sock.sendall(line)

    def hear(self, timeout=5):
        """Wait for a line; empty at the end."""
        self.sock.settimeout(timeout)
        return self.file.readline()

    def ask(self, line):
        """Say and hear."""
        self.say(line)
        return self.hear()

    def close(self):
        """End the connection."""
        self.file.close()
        self.sock.close()


@pytest.fixture
def echo():
    """An echo server."""
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo):
    """A proxy before the echo server."""
    with TCPProxy(echo.server_address[1]) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy):
    """Open connections through the proxy, closed at the end."""
    with contextlib.ExitStack() as stack:

        def connect():
            client = Client(proxy)
            stack.callback(client.close)
            return client

        yield connect


def round_trips(client, count):
    """How long each of some round trips takes."""
    times = []
    for _ in range(count):
        before = time.monotonic()
        client.ask(b"ping\n")
        times.append(time.monotonic() - before)
    return times


def test_it_forwards_both_ways(proxy, connect):
    """A proxy in between must not be noticed."""
    client = connect()
    assert client.ask(b"one\n") == b"one\n"
    assert client.ask(b"x" * 300_000 + b"\n") == b"x" * 300_000 + b"\n"
    assert proxy.connections == 1


def test_a_client_that_stops_sending_still_hears_the_answer(proxy, connect):
    """Half-closing is part of TCP; the proxy must not turn it into a cut."""
    client = connect()
    client.say(b"last\n")
    client.sock.shutdown(socket.SHUT_WR)
    assert client.hear() == b"last\n"
    assert client.hear() == b""
    wait_until(lambda: proxy.connections == 0)


def test_cut_resets_connections_and_serves_new_ones(proxy, connect):
    """A network that dropped connections works again for the next one."""
    client = connect()
    client.ask(b"one\n")
    proxy.cut()
    assert proxy.connections == 0
    with pytest.raises(ConnectionError):
        client.ask(b"two\n")
    assert connect().ask(b"three\n") == b"three\n"


def test_refuse_turns_new_connections_away_until_resume(proxy, connect):
    """A server that is down refuses at once; what was connected is another matter."""
    client = connect()
    client.ask(b"one\n")
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect()
    assert client.ask(b"two\n") == b"two\n"
    proxy.resume()
    assert connect().ask(b"three\n") == b"three\n"


def test_hang_accepts_and_forwards_nothing_until_resume(proxy, connect, echo):
    """A hung server is worse than a dead one: nothing fails, nothing comes."""
    client = connect()
    client.ask(b"one\n")
    proxy.hang()
    client.say(b"two\n")
    other = connect()
    other.say(b"three\n")
    with pytest.raises(TimeoutError):
        client.hear(0.1)
    assert echo.seen == [b"one\n"]
    proxy.resume()
    assert other.hear() == b"three\n"
    wait_until(lambda: set(echo.seen) == {b"one\n", b"two\n", b"three\n"})


def test_delay_is_added_to_each_round_trip_and_not_to_each_message(proxy, connect):
    """Latency must not become a lack of bandwidth: pipelines are measured through it."""
    client = connect()
    client.ask(b"warm\n")
    proxy.delay(0.1)
    before = time.monotonic()
    for number in range(50):
        client.say(b"%d\n" % number)
    assert [client.hear() for _ in range(50)] == [b"%d\n" % number for number in range(50)]
    assert 0.1 <= time.monotonic() - before < 2.5, "far from 50 times"
    proxy.delay(0)
    assert min(round_trips(client, 10)) < 0.1


def test_drop_and_cut_keeps_the_chunk_from_the_server(proxy, connect, echo):
    """A connection that breaks before COMMIT arrives: the server never saw it."""
    proxy.filter = cut_before(b"COMMIT")
    client = connect()
    client.ask(b"INSERT\n")
    with pytest.raises(ConnectionError):
        client.ask(b"COMMIT\n")
    assert echo.seen == [b"INSERT\n"]
    assert connect().ask(b"COMMIT\n") == b"COMMIT\n", "it fires once"


def test_cut_after_forward_delivers_the_chunk_and_resets_its_sender(proxy, connect, echo):
    """A client that loses its connection right after it sent does not know what became of it."""
    proxy.filter = lambda sender, chunk, connection: (
        Verdict.CUT_AFTER_FORWARD if b"COMMIT" in chunk else Verdict.FORWARD
    )
    client = connect()
    with pytest.raises(ConnectionError):
        client.ask(b"COMMIT\n")
    wait_until(lambda: echo.seen == [b"COMMIT\n"])


def test_a_lost_answer_means_that_the_server_did_act(proxy, connect, echo):
    """The hard case of a commit: it happened, and the client cannot know."""
    proxy.filter = lose_answer(b"COMMIT")
    bystander, client = connect(), connect()
    bystander.ask(b"hello\n")
    with pytest.raises(ConnectionError):
        client.ask(b"COMMIT\n")
    assert echo.seen == [b"hello\n", b"COMMIT\n"]
    assert bystander.ask(b"still here\n") == b"still here\n"


def test_hold_keeps_a_chunk_and_what_follows_until_resume(proxy, connect, echo):
    """A write frozen on its way arrives late, in order and whole."""
    proxy.filter = hold(b"late")
    client, other = connect(), connect()
    client.say(b"late\n")
    assert proxy.holding.wait(5)
    client.say(b"later\n")
    assert other.ask(b"now\n") == b"now\n"
    assert echo.seen == [b"now\n"]
    proxy.resume()
    assert not proxy.holding.is_set()
    assert [client.hear(), client.hear()] == [b"late\n", b"later\n"]


def test_a_filter_may_give_orders(proxy, connect):
    """A test reacts to what passes by at the moment it passes."""

    def filter_chunk(sender, chunk, connection):
        if chunk == b"fire\n":
            proxy.cut()
        return Verdict.FORWARD

    proxy.filter = filter_chunk
    bystander, client = connect(), connect()
    bystander.ask(b"hello\n")
    with pytest.raises(ConnectionError):
        client.ask(b"fire\n")
    with pytest.raises(ConnectionError):
        bystander.ask(b"hello?\n")


def test_a_server_that_is_not_there_resets_the_client():
    """The client must see an error, not silence: while it connects or soon after."""
    with (
        TCPProxy(1) as nowhere,
        pytest.raises(ConnectionError),
        contextlib.closing(Client(nowhere)) as client,
    ):
        client.ask(b"anyone?\n")


def test_stop_is_idempotent_and_frees_the_port(proxy, connect):
    """A test may stop it before its fixture does."""
    proxy.stop()
    proxy.stop()
    with pytest.raises(ConnectionRefusedError):
        connect()


def test_it_is_quick(proxy, connect):
    """Benchmarks run through it: it must cost microseconds, not milliseconds."""
    client = connect()
    assert statistics.median(round_trips(client, 500)) < 0.005
