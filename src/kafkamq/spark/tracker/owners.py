"""Which process of a machine settles a marker partition: the same one for as long as it lives.

Spark hands its idle Python workers out in turn, so the rows of a marker partition would reach
another process with each batch. A transactional id has one producer (R22): each move would fence
the last one and initialise again, 0.1 to 0.6 s every time. So the process that is the first to be
given a row of a slot owns the slot, and the others of this machine pass it theirs over a socket
that the slot names. When the owner ends, its socket is gone and the next process takes its place;
what was done by then is in the ledger. Where a machine has no such sockets, everyone does its own.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from kafkamq.errors import KafkaMQError
from kafkamq.spark.failures import error_named

_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<Q")
_PEER = struct.Struct("3i")  # pid, uid, gid
_MAX_BYTES = 1 << 30
_CONNECT_S = 5.0
REPLY_S = 165.0  # longer than one settlement may take
_TRIES = 5
_CAN_SHARE = hasattr(socket, "SO_PEERCRED")  # Linux: names without files, and who is behind them


class Owners:
    """Slots of work, each done by one process of this machine at a time; one owner thread.

    Args:
        name: The same in all processes that share slots, and in no others.
        perform: Does a request of a slot; never called twice at once for one slot.
    """

    def __init__(self, name: str, perform: Callable[[int, object], object]) -> None:
        self._name = name
        self._perform = perform
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._owned: dict[int, socket.socket] = {}
        self._peers: dict[int, socket.socket] = {}
        self._served: set[socket.socket] = set()
        self._later: SimpleQueue[tuple[int, object] | None] | None = None
        self._later_lock = threading.Lock()

    def run(self, slot: int, request: object) -> object:
        """Have the slot's owner perform a request, and become it where there is none.

        Raises:
            KafkaMQError: What ``perform`` raised, in whichever process, by its name and text.
        """
        for _ in range(_TRIES if _CAN_SHARE else 0):
            if slot in self._owned:
                break
            peer = self._peers.get(slot) or self._connect(slot)
            if peer is None:
                self._own(slot)  # another one may have been quicker
                continue
            try:
                _send(peer, request)
                reply = _receive(peer)
            except (OSError, EOFError) as error:
                # It ended, or does not answer: then this process does it, and fences it.
                _log.info("a slot's owner is gone", extra={"slot": slot, "error": str(error)})
                self._peers.pop(slot).close()
                if isinstance(error, TimeoutError):
                    break
                continue
            return _result(reply)
        return self._do(slot, request)

    def soon(self, slot: int, request: object) -> None:
        """Perform a request beside what else is done in this process; its result is dropped.

        One after the other, in one thread: there may be one for each of a thousand partitions.
        """
        with self._later_lock:
            if self._later is None:
                self._later = SimpleQueue()
                _thread(self._do_later, self._later)
            self._later.put((slot, request))

    def _do_later(self, later: SimpleQueue[tuple[int, object] | None]) -> None:
        while (wanted := later.get()) is not None:
            try:
                self._do(*wanted)
            except Exception:  # noqa: BLE001, PERF203 - nobody waits for it, and others are behind
                _log.exception("what was to be done soon failed", extra={"slot": wanted[0]})

    def _do(self, slot: int, request: object) -> object:
        with self._locks[slot]:
            return self._perform(slot, request)

    def _address(self, slot: int) -> bytes:
        return f"\0kafkamq/{self._name}/{slot}".encode()

    def _connect(self, slot: int) -> socket.socket | None:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.settimeout(_CONNECT_S)
            peer.connect(self._address(slot))
            if _is_stranger(peer):
                raise OSError("another user has taken the slot's name")
            peer.settimeout(REPLY_S)
        except OSError:
            peer.close()
            return None
        self._peers[slot] = peer
        return peer

    def _own(self, slot: int) -> None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(self._address(slot))
            listener.listen(64)
        except OSError:
            listener.close()
            time.sleep(0.01)
            return
        self._owned[slot] = listener
        self._locks[slot] = self._locks[slot]  # made here, before threads look for it
        _thread(self._accept, listener, slot)

    def _accept(self, listener: socket.socket, slot: int) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            if _is_stranger(peer):
                peer.close()
            else:
                _thread(self._serve, peer, slot)

    def _serve(self, peer: socket.socket, slot: int) -> None:
        self._served.add(peer)
        with peer, suppress(OSError, EOFError):
            while slot in self._owned:
                request = _receive(peer)
                try:
                    reply: tuple[object, ...] = (self._do(slot, request),)
                except Exception as error:  # noqa: BLE001 - raised by who asked
                    reply = (None, type(error).__name__, str(error))
                _send(peer, reply)
        self._served.discard(peer)

    def close(self) -> None:
        """Give up what is owned; who waits for an answer does it itself. Idempotent."""
        with self._later_lock:
            later, self._later = self._later, None
        if later is not None:
            with suppress(Empty):  # what nobody has begun
                while True:
                    later.get_nowait()
            later.put(None)
        owned, self._owned = self._owned, {}
        for each in (*owned.values(), *self._served, *self._peers.values()):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for each in (*owned.values(), *self._peers.values()):
            each.close()
        self._peers.clear()


def _thread(run: Callable[..., object], *args: object) -> None:
    threading.Thread(target=run, args=args, name="kafkamq-slot", daemon=True).start()


def _is_stranger(peer: socket.socket) -> bool:
    """Whether another user's process is at the other end: what comes from there is not read."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(found)[1] != os.getuid())


def _send(peer: socket.socket, value: object) -> None:
    data = pickle.dumps(value)
    peer.sendall(_LENGTH.pack(len(data)) + data)


def _receive(peer: socket.socket) -> object:
    (length,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size))
    if length > _MAX_BYTES:
        raise OSError(f"a request of {length} bytes")
    return pickle.loads(_exactly(peer, length))


def _exactly(peer: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = peer.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("the other end is closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _result(reply: object) -> object:
    assert isinstance(reply, tuple), "what _serve sends"
    if len(reply) == 1:
        return reply[0]
    _, name, text = reply
    raise error_named(name, text) or KafkaMQError(f"{name}: {text}")
