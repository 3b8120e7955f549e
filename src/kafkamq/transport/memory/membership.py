"""A consumer's membership in its group: rebalances, and the callbacks that follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kafkamq.transport.memory.transactional import encode_member

if TYPE_CHECKING:
    from kafkamq.transport.memory.cluster import Cluster

__all__ = ["Membership"]


class Membership:
    """The group's half of ``Consumer``."""

    cluster: Cluster
    _check_open: Callable[[], None]
    _is_closed: bool

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._group = str(settings["group.id"])
        self._generation = -1
        self._member_id = ""
        self._has_assigned = False

    def subscribe(
        self,
        topics: list[str],
        on_assign: Any = None,
        on_revoke: Any = None,
        on_lost: Any = None,
    ) -> None:
        """As confluent_kafka's."""
        raise NotImplementedError

    def unsubscribe(self) -> None:
        """As confluent_kafka's."""

    def consumer_group_metadata(self) -> Any:
        """As confluent_kafka's."""
        self._check_open()
        return encode_member(self._group, self._generation, self._member_id)

    def memberid(self) -> str | None:
        """As confluent_kafka's."""
        self._check_open()
        return self._member_id or None

    def _polled(self, now_s: float) -> None:
        pass

    def _next_callback(self) -> Callable[[], None] | None:
        return None

    def _next_poll_s(self, now_s: float) -> float:
        return math.inf

    def _finish_joining(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        """As confluent_kafka's."""
        self._is_closed = True
