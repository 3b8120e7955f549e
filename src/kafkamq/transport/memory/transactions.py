"""The transaction coordinator: epochs, fencing, timeouts, and what becomes visible."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kafkamq.transport.memory.log import Place, Transaction
from kafkamq.transport.memory.state import State


class StaleEpochError(Exception):
    """Another producer of the id was initialised later, or the broker aborted the transaction."""


@dataclass(slots=True, eq=False)
class _TransactionalId:
    epoch: int = -1
    timeout_s: float = 0.0
    open: Transaction | None = None
    last_was_committed: bool | None = None  # of this epoch


class Transactions:
    """All transactional ids of a cluster; the caller holds its condition."""

    def __init__(
        self, cluster: State, keep: Callable[[str, Place, tuple[int, str | None]], None]
    ) -> None:
        """``keep`` commits an offset of a group."""
        self._cluster = cluster
        self._keep = keep
        self._ids: dict[str, _TransactionalId] = {}

    def init(self, name: str, timeout_ms: int) -> int:
        """Fence earlier producers, abort what they had open, and tell the new epoch."""
        each = self._ids.setdefault(name, _TransactionalId())
        self._end(each, is_committed=False)
        each.epoch += 1
        each.timeout_s = timeout_ms / 1000
        each.last_was_committed = None
        return each.epoch

    def current(self, name: str, epoch: int) -> Transaction:
        """The open transaction; begun if there is none."""
        each = self._checked(name, epoch)
        if each.open is None:
            each.open = Transaction(time.monotonic())
            self._cluster.due(each.open.began_s + each.timeout_s)
        return each.open

    def end(self, name: str, epoch: int, *, is_committed: bool) -> bool:
        """Commit or abort; the same again changes nothing. False: it was ended otherwise."""
        each = self._checked(name, epoch)
        if each.open is None:
            return each.last_was_committed is is_committed
        self._end(each, is_committed=is_committed)
        return True

    def begun_again(self, name: str, epoch: int) -> None:
        """What the last transaction became is not asked any more."""
        each = self._ids[name]
        if each.epoch == epoch:
            each.last_was_committed = None

    def expire(self, now_s: float) -> None:
        """Abort what is open for longer than its timeout; its producer is fenced."""
        for each in self._ids.values():
            if each.open is None:
                continue
            if each.open.began_s + each.timeout_s <= now_s:
                self._end(each, is_committed=False)
                each.epoch += 1
            else:
                self._cluster.due(each.open.began_s + each.timeout_s)

    def has_pending_offset(self, group: str, place: Place) -> bool:
        """Whether an open transaction holds an offset for it."""
        wanted = group, place
        return any(
            each.open is not None and wanted in each.open.offsets for each in self._ids.values()
        )

    def _checked(self, name: str, epoch: int) -> _TransactionalId:
        each = self._ids[name]
        if each.epoch != epoch:
            raise StaleEpochError
        return each

    def _end(self, each: _TransactionalId, *, is_committed: bool) -> None:
        transaction, each.open = each.open, None
        if transaction is None:
            return
        each.last_was_committed = is_committed
        transaction.is_open = False
        transaction.is_aborted = not is_committed
        for partition in transaction.touched:
            partition.end_transaction(transaction)
        if is_committed:
            for (group, place), committed in transaction.offsets.items():
                self._keep(group, place, committed)
        self._cluster.changed.notify_all()
