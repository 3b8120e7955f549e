"""Messages of one process wait here to be handed out: in order of a shard, or in none; pure.

A shard (a key, a partition) hands out one message at a time: the next one follows when the one
before is done. A retry keeps its place at the front. Without order every message is a shard of its
own, and a retry goes behind what has come meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class Waiting(Generic[T]):
    """What is to be handed out, and when; times are in ms of one clock of the caller's.

    ``shard`` is None for a message that is in order with nothing.
    """

    def __init__(self) -> None:
        self._shards: dict[Hashable, deque[T]] = {}
        self._ready: deque[tuple[Hashable, T]] = deque()
        self._delayed: list[tuple[int, int, Hashable, T]] = []
        self._number = count()

    def __len__(self) -> int:
        blocked = sum([len(shard) - 1 for shard in self._shards.values()])
        return len(self._ready) + len(self._delayed) + blocked

    def add(self, shard: Hashable, item: T) -> None:
        if shard is not None:
            waiting = self._shards.get(shard)
            if waiting is not None:
                waiting.append(item)
                return
            self._shards[shard] = deque((item,))
        self._ready.append((shard, item))

    def take(self, now_ms: int) -> tuple[Hashable, T] | None:
        """Return the next message and its shard, or None: nothing is ready."""
        delayed = self._delayed
        while delayed and delayed[0][0] <= now_ms:
            _, _, shard, item = heappop(delayed)
            self._ready.append((shard, item))
        return self._ready.popleft() if self._ready else None

    def put_back(self, shard: Hashable, item: T) -> None:
        """What ``take`` gave was not used: it is the next again."""
        self._ready.appendleft((shard, item))

    def done(self, shard: Hashable) -> None:
        """What was handed out of a shard is done: the next one may follow."""
        waiting = self._shards.get(shard) if shard is not None else None
        if waiting is None:
            return
        waiting.popleft()
        if waiting:
            self._ready.append((shard, waiting[0]))
        else:
            del self._shards[shard]

    def retry(self, shard: Hashable, item: T, due_ms: int) -> None:
        """What was handed out comes again, as ``item``, from ``due_ms`` on."""
        waiting = self._shards.get(shard) if shard is not None else None
        if shard is not None:
            if waiting is None:
                return
            waiting[0] = item
        heappush(self._delayed, (due_ms, next(self._number), shard, item))

    def drop(self, shard: Hashable) -> None:
        self._shards.pop(shard, None)
        self.keep(lambda other, _: other != shard)

    def keep(self, wanted: Callable[[Hashable, T], bool]) -> None:
        """Forget what is not wanted of what could be handed out."""
        self._ready = deque(each for each in self._ready if wanted(*each))
        self._delayed = [each for each in self._delayed if wanted(each[2], each[3])]
        self._delayed.sort()

    def next_due_ms(self) -> int | None:
        """Return when the first message that waits for its time is due."""
        return self._delayed[0][0] if self._delayed else None

    def items(self) -> Iterator[T]:
        """Yield all that is not handed out and not behind something that is."""
        for _, item in self._ready:
            yield item
        for _, _, _, item in self._delayed:
            yield item

    def clear(self) -> list[T]:
        """Forget all; returns what was not handed out, in no certain order."""
        found = [*self.items()]
        for shard in self._shards.values():
            found += list(shard)[1:]
        self._shards, self._ready, self._delayed = {}, deque(), []
        return found
