"""``def`` handlers in processes of their own: for work that needs the CPU, or may take a process
with it. Each thread of the pool owns one process, which is replaced when it dies or hangs.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from kafkamq.errors import ConfigError
from kafkamq.queue.arguments import Binder, BodyError
from kafkamq.queue.handler import HandlerSpec
from kafkamq.queue.message import Message
from kafkamq.queue.reasons import reason_of
from kafkamq.runtime.children import leave_signals_to_parent, start_child
from kafkamq.runtime.threads import STOPPED, timed_out
from kafkamq.types import Ack, Headers, MessageId, Nack, Reject

__all__ = ["PlainMessage", "ProcessCalls"]

_JOIN_S = 5.0
_AGAIN_S = 1.0  # after a process that could not start
_log = logging.getLogger(__name__)
_SENT = (BaseException, Ack, Nack, Reject)


@dataclass(frozen=True, slots=True)
class PlainMessage:
    """What a handler in another process gets for a ``Message``: its facts, without verdicts."""

    payload: bytes | None
    key: bytes | None
    raw_headers: Headers
    id: str
    queue_id: str
    delivery_count: int
    timestamp_ms: int
    message_id: MessageId
    is_kafkamq_message: ClassVar[bool] = True  # a handler's parameter of this type gets it

    @property
    def headers(self) -> dict[str, bytes | None]:
        """The headers; the last of a name counts."""
        return dict(self.raw_headers)


class ProcessCalls:
    """Calls a handler in the process of the calling thread."""

    def __init__(self, spec: HandlerSpec, calls: Callable[[], Any]) -> None:
        """``calls`` gives the pool's ``Calls``, for the verdict of a timeout.

        Raises:
            ConfigError: The handler cannot be called in another process.
        """
        try:
            self._function = pickle.dumps(spec.function)
        except Exception as error:
            raise ConfigError(
                f"handler of queue {spec.queue.queue_id!r}: processes= needs a function that can "
                f"be imported, as a module's ({error})"
            ) from error
        self._spec = spec
        self._calls = calls
        self._local = threading.local()
        self._lock = threading.Lock()
        self._children: set[_Child] = set()
        self._spare: list[_Child] = []
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the first process, which says whether one can.

        Raises:
            ConfigError: The handler cannot be loaded there; says why.
        """
        try:
            child = _Child(self._function)
        except _LoadError as error:
            name = self._spec.queue.queue_id
            raise ConfigError(
                f"handler of queue {name!r}: processes= needs a function that another process can "
                f"load: {error}"
            ) from error
        with self._lock:
            self._children.add(child)
            self._spare.append(child)

    def _child(self) -> _Child | None:
        """The process of this thread; None: closed.

        One that cannot start says nothing about the message, which is held until one can.
        """
        child: _Child | None = getattr(self._local, "child", None)
        while child is None and not self._closed.is_set():
            with self._lock:
                child = self._spare.pop() if self._spare else None
            if child is None:
                try:
                    child = _Child(self._function)
                except (_LoadError, OSError) as error:
                    _log.error(
                        "a process for a handler cannot start; it is tried again",
                        extra={"queue": self._spec.queue.queue_id, "said": str(error)},
                    )
                    self._closed.wait(_AGAIN_S)
                    continue
            with self._lock:
                self._children.add(child)
                self._local.child = child
        if child is not None and self._closed.is_set():
            self._end(child)
            return None
        return child

    def __call__(self, message: Message) -> object:
        """Call the handler; what it raised is raised here."""
        child = self._child()
        if child is None:
            return STOPPED
        timeout_ms = self._spec.timeout_ms
        try:
            outcome = child.call(_plain(message), timeout_ms / 1000 if timeout_ms else None)
        except TimeoutError:
            self._end(child)
            _log.warning("a handler takes too long; its process is ended")
            return timed_out(self._calls())
        except (EOFError, OSError):
            self._end(child)
            code = child.exit_code
            _log.warning("the process of a handler has died", extra={"exit_code": code})
            return Nack(reason=f"the process of the handler has died (exit code {code})")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _end(self, child: _Child) -> None:
        self._local.child = None
        with self._lock:
            self._children.discard(child)
        child.kill()

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._closed.set()
            children, self._children = list(self._children), set()
        for child in children:
            child.kill()


class _LoadError(Exception):
    """A process cannot call the handler; says why."""


class _Child:
    """One process and the pipe to it."""

    def __init__(self, function: bytes) -> None:
        """Start it.

        Args:
            function: The handler, pickled: it is the process that says why it cannot load it.

        Raises:
            _LoadError: It cannot.
        """
        self._process, self._pipe = start_child(_serve, function, name="kafkamq-handler")
        try:
            refusal = self._pipe.recv()  # from here on time counts
        except (EOFError, OSError):
            self._process.join(_JOIN_S)
            refusal = f"it has died at its start (exit code {self.exit_code})"
        if refusal is not None:
            self.kill()
            raise _LoadError(refusal)

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def call(self, message: PlainMessage, timeout_s: float | None) -> object:
        self._pipe.send(message)
        if not self._pipe.poll(timeout_s):
            raise TimeoutError
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(_JOIN_S)
        self._pipe.close()


def _plain(message: Message) -> PlainMessage:
    return PlainMessage(
        message.payload,
        message.key,
        message.raw_headers,
        message.id,
        message.queue_id,
        message.delivery_count,
        message.timestamp_ms,
        message.message_id,
    )


def _serve(pipe: Connection, pickled: bytes) -> None:
    """The process: answers until the pipe ends."""
    leave_signals_to_parent()
    try:
        function: Callable[..., Any] = pickle.loads(pickled)
        binder = Binder(function)
    except BaseException as error:  # noqa: BLE001 - the parent says so, and holds its messages
        pipe.send(reason_of(error))
        return
    pipe.send(None)
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        try:
            outcome = function(*binder.arguments(message))
        except BaseException as error:  # noqa: BLE001 - the verdict is given in the parent
            outcome = _sendable(error)
        pipe.send(outcome if isinstance(outcome, _SENT) else None)


def _sendable(error: BaseException) -> BaseException:
    if isinstance(error, BodyError):
        return error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - some errors cannot be pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
