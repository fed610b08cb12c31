"""A TCP proxy that tests put before a server, to make the network misbehave at an exact point."""

from __future__ import annotations

import enum
import itertools
import re
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Self

#: Who sent the bytes.
Direction: TypeAlias = Literal["client", "server"]

#: What a filter looks for in a chunk: bytes, or a compiled expression.
Pattern: TypeAlias = "bytes | re.Pattern[bytes]"

#: A COMMIT, as the drivers send it; neither a ``SET AUTOCOMMIT`` nor a ``READ COMMITTED``, nor
#: a statement on ``celery_lease_commit``.
COMMIT = re.compile(rb"(?<!AUTO)(?<!_)COMMIT(?!TED)", re.IGNORECASE)

_CHUNK = 1 << 16
_BACKLOG = 1 << 20


class Verdict(enum.Enum):
    """What becomes of a chunk of bytes."""

    #: Pass it on.
    FORWARD = "forward"
    #: Throw it away and reset the connection on both sides.
    DROP_AND_CUT = "drop and cut"
    #: Pass it on, then end the connection: by a reset for its sender, in order for its receiver.
    CUT_AFTER_FORWARD = "cut after forward"
    #: Keep it, and all that follows in this direction, until `TCPProxy.resume`.
    HOLD = "hold"


#: Called on the proxy's thread with the bytes of one `recv`: one message, if it is a small one.
Filter: TypeAlias = "Callable[[Direction, bytes, Connection], Verdict]"


class Connection:
    """One client's connection through the proxy."""

    def __init__(self, number: int, client: socket.socket, server: socket.socket) -> None:
        #: 1 for the first connection, and so on: filters tell connections apart by it.
        self.number = number
        self.pipes = (_Pipe(self, "client", client, server), _Pipe(self, "server", server, client))

    def close(self, *, reset: bool = False) -> None:
        """Close both sides, in order or by a reset."""
        for pipe in self.pipes:
            _close(pipe.source, reset=reset)

    @property
    def closed(self) -> bool:
        """Whether both sides are closed."""
        return all(pipe.source.fileno() < 0 for pipe in self.pipes)


class _Pipe:
    """One direction of a connection: what was read from one side and not yet sent to the other."""

    def __init__(
        self,
        connection: Connection,
        direction: Direction,
        source: socket.socket,
        sink: socket.socket,
    ) -> None:
        self.connection = connection
        self.direction = direction
        self.source = source
        self.sink = sink
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.size = 0
        self.held = False
        #: The source sends no more; what waits is still delivered.
        self.ended = False
        #: The sink was told so.
        self.drained = False

    def put(self, due: float, chunk: bytes) -> None:
        self.waiting.append((due, chunk))
        self.size += len(chunk)

    def send(self, now: float) -> None:
        """Send what is due, as far as the sink takes it."""
        while self.waiting and not self.held and self.waiting[0][0] <= now:
            due, chunk = self.waiting.popleft()
            try:
                sent = self.sink.send(chunk)
            except BlockingIOError:
                sent = 0
            self.size -= sent
            if sent < len(chunk):
                self.waiting.appendleft((due, chunk[sent:]))
                return
        if self.ended and not self.waiting and not self.drained:
            self.drained = True
            self.sink.shutdown(socket.SHUT_WR)


class TCPProxy:
    """
    A proxy on 127.0.0.1, on one thread.

    The verbs return once they are done: after `cut()` no connection is left. Filters may call
    them too.
    """

    def __init__(self, target: int, *, filter: Filter | None = None) -> None:  # noqa: A002 - no better word
        """Forward to the port `target` of 127.0.0.1."""
        self.target = target
        #: Decides about each chunk; None forwards all.
        self.filter = filter
        #: Set while a chunk is held.
        self.holding = threading.Event()
        self._latency = 0.0
        self._hung = False
        self._running = False
        self._connections: list[Connection] = []
        self._numbers = itertools.count(1)
        self._orders: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._waker, self._woken = socket.socketpair()
        # Never listens: it keeps the port ours while new connections are refused.
        self._placeholder = self._bind(0)
        #: The port to connect to.
        self.port: int = self._placeholder.getsockname()[1]
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)

    def start(self) -> Self:
        """Begin to forward."""
        self._listen()
        self._running = True
        self._thread.start()
        return self

    def stop(self) -> None:
        """Cut everything and end. Idempotent."""
        if self._running:
            self._order(self._end)
            self._thread.join()
        for sock in (self._placeholder, self._waker, self._woken):
            sock.close()

    def cut(self) -> None:
        """Reset all connections; new ones are served."""
        self._order(self._cut)

    def refuse(self) -> None:
        """Refuse new connections; those that are there go on."""
        self._order(self._unlisten)

    def hang(self) -> None:
        """Accept connections, and forward nothing on any."""
        self._order(self._hang)

    def resume(self) -> None:
        """Undo `refuse` and `hang`, and let go what was held: nothing that came in is lost."""
        self._order(self._resume)

    def delay(self, seconds: float) -> None:
        """Add this to each round trip. It is latency: what is sent together arrives together."""
        self._latency = seconds / 2

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *exc: object) -> None:
        """Stop."""
        self.stop()

    # Below this line, all but _order happens on the proxy's thread.

    def _order(self, action: Callable[[], None]) -> None:
        if threading.current_thread() is self._thread:
            action()
            return
        done = threading.Event()
        self._orders.append((action, done))
        self._waker.send(b"x")
        if not done.wait(10):
            raise TimeoutError("the proxy does not react; does its filter block?")

    def _run(self) -> None:
        while self._running:
            readable, writable = self._wait()
            now = time.monotonic()
            for pipe in writable:
                self._guarded(_Pipe.send, pipe, now)
            for pipe in readable:
                self._guarded(self._receive, pipe, now)
            self._connections = [each for each in self._connections if not each.closed]
            # Last, so that what could be read before an order was read before it.
            self._obey()

    def _wait(self) -> tuple[list[_Pipe], list[_Pipe]]:
        """Wait for something to do; accept new connections on the way."""
        sources: dict[socket.socket, _Pipe | None] = {self._woken: None}
        sinks: dict[socket.socket, _Pipe] = {}
        timeout: float | None = None
        if self._listener:
            sources[self._listener] = None
        now = time.monotonic()
        for pipe in self._open_pipes():
            if not pipe.ended and pipe.size < _BACKLOG:
                sources[pipe.source] = pipe
            if pipe.waiting and not pipe.held:
                wait = pipe.waiting[0][0] - now
                if wait <= 0:
                    sinks[pipe.sink] = pipe
                else:
                    timeout = wait if timeout is None else min(timeout, wait)
        # Not epoll, whose timeouts are whole milliseconds.
        readable, writable, _ = select.select(list(sources), list(sinks), [], timeout)
        if self._listener in readable:
            self._accept()
        return [pipe for sock in readable if (pipe := sources[sock])], [sinks[s] for s in writable]

    def _open_pipes(self) -> list[_Pipe]:
        if self._hung:
            return []
        return [pipe for connection in self._connections for pipe in connection.pipes]

    @staticmethod
    def _guarded(action: Callable[[_Pipe, float], None], pipe: _Pipe, now: float) -> None:
        """Act on a pipe whose connection is open; an error on one side resets the other too."""
        if pipe.connection.closed:
            return
        try:
            action(pipe, now)
        except OSError:
            pipe.connection.close(reset=True)
        if all(each.drained for each in pipe.connection.pipes):
            pipe.connection.close()

    def _receive(self, pipe: _Pipe, now: float) -> None:
        chunk = pipe.source.recv(_CHUNK)
        if not chunk:
            pipe.ended = True
            pipe.send(now)
            return
        verdict = Verdict.FORWARD
        if self.filter is not None:
            verdict = self.filter(pipe.direction, chunk, pipe.connection)
        if pipe.connection.closed:
            return  # the filter cut it
        if verdict is Verdict.DROP_AND_CUT:
            pipe.connection.close(reset=True)
            return
        if verdict is Verdict.HOLD:
            pipe.held = True
            self.holding.set()
        pipe.put(now + self._latency, chunk)
        if verdict is Verdict.CUT_AFTER_FORWARD:
            pipe.sink.setblocking(True)
            pipe.sink.sendall(b"".join(chunk for _, chunk in pipe.waiting))
            _close(pipe.source, reset=True)
            _close(pipe.sink)
        else:
            pipe.send(now)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket()
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.connect_ex(("127.0.0.1", self.target))  # its outcome shows at the first recv
        self._connections.append(Connection(next(self._numbers), client, server))

    def _obey(self) -> None:
        while self._orders:
            self._woken.recv(1)
            action, done = self._orders.popleft()
            action()
            done.set()

    def _cut(self) -> None:
        for connection in self._connections:
            connection.close(reset=True)
        self._connections = []
        self.holding.clear()

    def _hang(self) -> None:
        self._hung = True

    def _resume(self) -> None:
        self._hung = False
        self.holding.clear()
        for pipe in self._open_pipes():
            pipe.held = False
        if self._listener is None:
            self._listen()

    def _end(self) -> None:
        self._running = False
        self._unlisten()
        self._cut()

    def _listen(self) -> None:
        self._listener = self._bind(self.port)
        self._listener.listen(128)

    def _unlisten(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    @staticmethod
    def _bind(port: int) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", port))
        return sock


def _close(sock: socket.socket, *, reset: bool = False) -> None:
    if reset and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def _found(pattern: Pattern, chunk: bytes) -> bool:
    return pattern in chunk if isinstance(pattern, bytes) else bool(pattern.search(chunk))


def once(verdict: Verdict, pattern: Pattern, direction: Direction = "client") -> Filter:
    """Give this verdict to the first chunk of a direction that has `pattern` in it."""
    fired = False

    def filter_chunk(sender: Direction, chunk: bytes, connection: Connection) -> Verdict:
        nonlocal fired
        if fired or sender != direction or not _found(pattern, chunk):
            return Verdict.FORWARD
        fired = True
        return verdict

    return filter_chunk


def cut_before(pattern: Pattern) -> Filter:
    """Cut the connection once, before the server gets the chunk with `pattern`."""
    return once(Verdict.DROP_AND_CUT, pattern)


def hold(pattern: Pattern) -> Filter:
    """Hold the first chunk with `pattern` on its way to the server, until `resume`."""
    return once(Verdict.HOLD, pattern)


def lose_answer(pattern: Pattern) -> Filter:
    """Let the server act on the chunk with `pattern`, once, and cut in place of its answer."""
    asking: Connection | None = None
    fired = False

    def filter_chunk(sender: Direction, chunk: bytes, connection: Connection) -> Verdict:
        nonlocal asking, fired
        if sender == "client" and not fired and _found(pattern, chunk):
            asking, fired = connection, True
        elif sender == "server" and connection is asking:
            asking = None
            return Verdict.DROP_AND_CUT
        return Verdict.FORWARD

    return filter_chunk
