"""The broker's side: messages go out in flushes, and every wait has an end.

With kombu 5.7 a flush on Redis is one pipeline. On RabbitMQ the messages of a flush
are confirmed together at its end. Elsewhere each message goes out at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

from amqp.exceptions import FrameSyntaxError
from kombu import exceptions

from celery_lease.occurrence import storable

__all__ = ["FLUSH", "Flushed", "Publisher", "Remedy", "Undelivered", "Unsent", "said"]

#: Messages in one flush. A leader that hangs in a flush sends it late: it stays small.
FLUSH = 100

_UNCERTAIN: tuple[type[BaseException], ...] = tuple(
    getattr(exceptions, each)
    for each in ("OperationalError", "BatchPublishError")  # the second is new in 5.7
    if hasattr(exceptions, each)
)
#: What a message raises that cannot be built: arguments, options, an unknown queue. (kombu
#: counts KeyError among Redis's connection errors.)
_OF_THE_MESSAGE = (
    exceptions.SerializationError,
    exceptions.SerializerNotInstalled,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    TypeError,
    ValueError,
)


class Undelivered(Exception):
    """A flush failed; which of its messages the broker has is not known of all of them."""

    def __init__(self, message: str, *, turned_away: bool = False, lasting: bool = False) -> None:
        super().__init__(message)
        #: Ids of the runs whose messages the broker is known to have.
        self.taken: frozenset[str] = frozenset()
        #: Whether the broker was there and turned something away: one message may be to blame.
        self.turned_away = turned_away
        #: Whether the same message will be turned away again.
        self.lasting = lasting


class Remedy(Enum):
    """What to do about a run whose message could not be made."""

    #: Try again: the same message may be made later.
    RETRY = "retry"
    #: Fail it: the same message can never be made.
    FAIL = "fail"
    #: Skip it: the entry is gone, so there is nothing to make it of.
    SKIP = "skip"


class Unsent(NamedTuple):
    """Why one message could not be made, while the broker has the others of its flush."""

    #: The error, in words.
    reason: str
    #: What to do about its run.
    remedy: Remedy


class Flushed(NamedTuple):
    """What became of the runs of a flush, all of whose messages the broker has."""

    #: Ids of runs that the flush did not get to.
    unreached: frozenset[str]
    #: Runs whose message could not be made, by id, and why.
    unsent: dict[str, Unsent]


class Publisher:
    """One connection to the broker, made when it is needed and dropped when it fails.

    Args:
        connect: Returns a new connection, given transport options of ours.
        producer_class: The scheduler's class of producers.
        timeout: Seconds that connecting, sending and confirming may each take.
    """

    def __init__(
        self, connect: Callable[[dict[str, Any]], Any], producer_class: Any, *, timeout: float
    ) -> None:
        self._connect = connect
        self._producer_class = producer_class
        self._timeout = timeout
        self._producer: Any = None
        self._publish: _Publish | None = None
        self._confirms: _Confirms | None = None
        #: Whether messages go out at the end of a flush, and not before.
        self._deferred = False

    @contextmanager
    def flush(self) -> Iterator[Any]:
        """Yield a producer. Leaving the block means that the broker has the messages.

        Raises:
            Undelivered: It may have all of them, some, or none.
        """
        try:
            producer = self._ready()
            if self._confirms is not None:
                self._confirms.wait(self._timeout)  # For what an earlier flush left.
            with producer.batch(FLUSH) if hasattr(producer, "batch") else nullcontext():
                yield producer
            if self._confirms is not None:
                self._confirms.wait(self._timeout)
        except Exception as error:
            if not self.is_delivery(error):
                raise
            lasting = self._is_lasting(error)
            turned_away = lasting or isinstance(error, _Nacked) or not self._is_brokers(error)
            # Of a connection that is blocked the broker reads the rest later, even if we
            # drop it: each new one would add another copy of every message.
            if not self._is_blocked(error):
                self.close()
            raise Undelivered(said(error), turned_away=turned_away, lasting=lasting) from error

    def receipt(self) -> Callable[[], bool]:
        """Return what tells, at any time, whether the broker has the last message for certain."""
        if self._confirms is not None:
            return self._confirms.receipt()
        return _not_known if self._deferred else _known

    def raised(self, error: BaseException) -> bool:
        """Return whether *error* comes from publishing, and not from what makes a message.

        A user's own code may raise a broker's kind of error too: a lazy argument that reads
        a file, a router that asks another service.
        """
        known = self._publish.error if self._publish is not None else None
        each: BaseException | None = error
        while each is not None and each is not known:
            each = each.__cause__ or each.__context__
        return each is not None

    def is_delivery(self, error: BaseException) -> bool:
        """Return whether the same message may go out later; not if *error* is its own.

        In doubt it may: a result backend that is away raises what its driver raises.
        """
        cause = _cause(error)
        # A certificate that is not trusted is a ValueError, too.
        return isinstance(cause, OSError) or not isinstance(cause, _OF_THE_MESSAGE)

    def _is_brokers(self, error: BaseException) -> bool:
        """Return whether *error* is the broker's, and not a third party's."""
        connection = self._producer.connection if self._producer is not None else None
        theirs = () if connection is None else connection.connection_errors
        return isinstance(error, (*_UNCERTAIN, OSError, *theirs))

    def _is_lasting(self, error: BaseException) -> bool:
        """Return whether the broker turned a message away for what it is, not for now.

        Only AMQP tells the two apart: an unknown exchange, rights that are missing. What
        AMQP itself cannot write, a set among the headers say, it calls an error of the
        connection.
        """
        if self._confirms is None:
            return False
        connection = self._producer.connection
        cause = _cause(error)
        if isinstance(cause, FrameSyntaxError):
            return True
        return isinstance(cause, connection.channel_errors) and not isinstance(
            cause, (*connection.connection_errors, *connection.recoverable_channel_errors)
        )

    def _is_blocked(self, error: BaseException) -> bool:
        """Return whether the broker only takes nothing for now, and has said so."""
        confirms = self._confirms
        return confirms is not None and confirms.blocked and isinstance(error, TimeoutError)

    def close(self) -> None:
        """Drop the connection."""
        producer = self._producer
        self._producer = self._publish = self._confirms = None
        if producer is not None:
            # collect() and not release(): a connection that hangs must not hang us.
            producer.connection.collect(self._timeout)

    def _ready(self) -> Any:
        if self._producer is None:
            connection = self._connect(self._options())
            retries = max(1, len(connection.alt))
            connection.ensure_connection(
                max_retries=retries, interval_start=0, interval_step=0, timeout=self._timeout
            )
            self._producer = self._producer_class(connection, auto_declare=False)
            self._producer.maybe_declare = _Declared(self._producer.maybe_declare)
            self._publish = self._producer.publish = _Publish(self._producer.publish)
            self._deferred = getattr(self._producer, "supports_batch_publish", False)
            if connection.transport.driver_type == "amqp":
                self._confirms = _Confirms(self._producer.channel)
        return self._producer

    def _options(self) -> dict[str, Any]:
        """Return transport options that give each wait an end, where the transport has them."""
        probe = self._connect({})
        driver, given = probe.transport.driver_type, probe.transport_options
        names: tuple[str, ...] = ()
        options: dict[str, Any] = {}
        if driver == "redis":
            # redis-py waits for ever by default, whatever socket.setdefaulttimeout() says.
            names = ("socket_timeout", "socket_connect_timeout")
        elif driver == "amqp":
            names = ("read_timeout", "write_timeout")
            options["confirm_publish"] = False  # confirmed by the flush, not one by one
        return {**{each: self._timeout for each in names if each not in given}, **options}


def said(error: BaseException) -> str:
    """Return an error in words, one line of them, that every log and every database takes."""
    cause = _cause(error)
    # SQLAlchemy goes on with its statement, and with what may be a message's arguments.
    text = str(cause).partition("\n[SQL:")[0]
    return storable(f"{type(cause).__name__}: {text}")


def _cause(error: BaseException) -> BaseException:
    """Return what kombu has wrapped: a KeyError of the message's own, too, on Redis."""
    wrapped = error.__cause__ if isinstance(error, _UNCERTAIN) else None
    return error if wrapped is None else wrapped


def _known() -> bool:
    return True


def _not_known() -> bool:
    return False


#: Queues that are remembered as declared: a router may make another for each message.
_QUEUES = 1000


class _Declared:
    """Declares each queue once a connection.

    kombu knows that a queue was declared, but copies it for each message to find out:
    a tenth of what a message costs.
    """

    def __init__(self, declare: Callable[..., Any]) -> None:
        self._declare = declare
        #: By id, and kept, so that no other queue gets the same one.
        self._known: dict[int, Any] = {}

    def __call__(self, entity: Any, *args: Any, **kwargs: Any) -> Any:
        if id(entity) in self._known:
            return False
        declared = self._declare(entity, *args, **kwargs)
        if getattr(entity, "can_cache_declaration", False):
            if len(self._known) >= _QUEUES:
                self._known.clear()
            self._known[id(entity)] = entity
        return declared


class _Publish:
    """A producer's ``publish``, which remembers what it raised."""

    def __init__(self, publish: Callable[..., Any]) -> None:
        self._publish = publish
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._publish(*args, **kwargs)
        except Exception as error:
            self.error = error
            raise


class _Nacked(OSError):
    """The broker did not want a message now: its queue may be full."""


class _Confirms:
    """The publisher confirms of one AMQP channel, waited for once a flush."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._waiting: set[int] = set()
        self._tag = 0
        self._nacked: set[int] = set()
        #: Whether the broker takes nothing for now: it is short of memory or of disk.
        self.blocked = False
        channel.connection.on_blocked = self._block
        channel.connection.on_unblocked = self._unblock
        channel.events["basic_ack"].add(self._acknowledged)
        channel.events["basic_nack"].add(self._refused)
        channel.confirm_select()
        self._publish = channel.basic_publish
        channel.basic_publish = self._counted

    def wait(self, timeout: float) -> None:
        """Wait until the broker has answered for every message.

        Raises:
            OSError: It did not in time, or it refused one.
        """
        end = time.monotonic() + timeout
        while self._waiting:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{len(self._waiting)} messages were not confirmed")
            self._channel.connection.drain_events(timeout=left)
        if self._nacked:  # The channel is dropped for it.
            raise _Nacked(f"the broker refused {len(self._nacked)} messages")

    def receipt(self) -> Callable[[], bool]:
        """Return what tells whether the broker has confirmed the last message."""
        tag = self._tag
        return lambda: tag not in self._waiting and tag not in self._nacked

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self._tag += 1
        self._waiting.add(self._tag)
        return self._publish(*args, **kwargs)

    def _acknowledged(self, tag: int, multiple: bool) -> None:
        if multiple:
            self._waiting = {each for each in self._waiting if each > tag}
        else:
            self._waiting.discard(tag)

    def _block(self, _reason: str) -> None:
        self.blocked = True

    def _unblock(self) -> None:
        self.blocked = False

    def _refused(self, tag: int, multiple: bool) -> None:
        before = set(self._waiting)
        self._acknowledged(tag, multiple)
        self._nacked |= before - self._waiting
