"""Messages that wait in a process: shards in order, retries in their time."""

from __future__ import annotations

from kafkamq.queue.rules.waiting import Waiting


def take_all(waiting: Waiting[str], now_ms: int = 0) -> list[str]:
    found = []
    while (taken := waiting.take(now_ms)) is not None:
        found.append(taken[1])
    return found


def test_a_shard_hands_out_one_at_a_time() -> None:
    waiting: Waiting[str] = Waiting()
    for item in ("a1", "a2", "b1"):
        waiting.add(item[0], item)
    assert take_all(waiting) == ["a1", "b1"]
    assert len(waiting) == 1
    waiting.done("a")
    assert take_all(waiting) == ["a2"]
    waiting.done("a")
    waiting.done("a")
    assert take_all(waiting) == []


def test_a_retry_keeps_its_place_in_a_shard() -> None:
    waiting: Waiting[str] = Waiting()
    for item in ("a1", "a2"):
        waiting.add("a", item)
    assert take_all(waiting) == ["a1"]
    waiting.retry("a", "a1 again", 50)
    assert waiting.next_due_ms() == 50
    assert take_all(waiting, 49) == []
    assert take_all(waiting, 50) == ["a1 again"]
    waiting.done("a")
    assert take_all(waiting, 50) == ["a2"]


def test_without_order_nothing_waits_for_a_retry() -> None:
    waiting: Waiting[str] = Waiting()
    waiting.add(None, "x")
    waiting.add(None, "z")
    assert take_all(waiting) == ["x", "z"]
    waiting.retry(None, "x", 10)
    waiting.retry(None, "z", 5)
    assert take_all(waiting, 4) == []
    assert take_all(waiting, 10) == ["z", "x"]


def test_a_dropped_shard_is_forgotten_with_its_retries() -> None:
    waiting: Waiting[str] = Waiting()
    for item in ("a1", "a2", "b1"):
        waiting.add(item[0], item)
    assert waiting.take(0) == ("a", "a1")
    waiting.drop("a")
    waiting.retry("a", "a1", 0)
    waiting.done("a")
    assert take_all(waiting, 10) == ["b1"]
    assert len(waiting) == 0
    waiting.put_back("b", "b1")
    assert list(waiting.items()) == ["b1"]
