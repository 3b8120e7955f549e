"""Rows of a settlement: each message once, in R32's order, wherever a transaction ends (R16)."""

from __future__ import annotations

import random

from kafkamq.markers.rules.delivery import (
    Carry,
    DueCause,
    Rows,
    Settle,
    each_message,
    row_order,
    size_of,
)
from kafkamq.types import MessageId


def a_plan(rng: random.Random) -> list[Settle | Carry]:
    """Holds of some STARTs; those of one page have messages between each other's."""
    plan: list[Settle | Carry] = []
    for start_offset in rng.sample(range(100), rng.randint(0, 4)):
        if rng.random() < 0.2:
            plan.append(Carry(start_offset, MessageId(0, start_offset), 5))
            continue
        for page in rng.sample(range(5), rng.randint(1, 3)):
            log = rng.choice([(b"", 0), (b"t" * 16, 1)])
            taken = 0
            for deadline_ms in range(rng.randint(1, 3)):
                bits = rng.getrandbits(64) & rng.getrandbits(64) & ~taken
                taken |= bits
                if bits:
                    at = (bits & -bits).bit_length() - 1
                    first = MessageId(rng.randint(0, 1), page * 64 + at, *log)
                    plan.append(
                        Settle(
                            start_offset, first, False, DueCause.NACKED, 0, 9, deadline_ms, -1,
                            bits >> at,
                        )
                    )  # fmt: skip
    rng.shuffle(plan)
    return plan


def test_rows_are_the_messages_in_order_wherever_they_are_cut() -> None:
    rng = random.Random(5)
    for _ in range(300):
        plan = a_plan(rng)
        rows = Rows(plan)
        wanted = sorted(each_message(plan), key=row_order)
        assert len(rows) == len(wanted)
        begin = 0
        while begin < len(rows):
            end = begin + rng.choice((1, 3, 40, 500))
            part = rows.part(begin, end)
            assert each_message(part) == wanted[begin:end]
            assert sum(map(size_of, part)) == min(end, len(rows)) - begin
            begin = end
        assert each_message(rows.part(len(rows) // 2)) == wanted[len(rows) // 2 :]


def test_what_no_other_hold_lies_between_stays_together() -> None:
    first, second = MessageId(0, 0), MessageId(0, 64)
    plan = [Settle(7, each, False, DueCause.NACKED, 0, 9, 1, -1, (1 << 64) - 1) for each in
            (second, first)]  # fmt: skip
    assert [each.message_id for each in Rows(plan).part(0)] == [first, second]
    assert not Rows([]).part(0)
