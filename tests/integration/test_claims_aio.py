"""The asyncio twins of claims."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.claim_logs import ClaimTopics, read_topic
from tests.waiting import within

from kafkamq.aio.claims import Admin, Cluster, RangeClaims
from kafkamq.claims import Batch
from kafkamq.errors import StateError


def test_claims_with_asyncio(bootstrap: str) -> None:
    topics = ClaimTopics(bootstrap)
    topics.fill(6)
    output = f"{topics.work}-out"
    topics.create(output, 1)

    async def run() -> None:
        async with Cluster(
            bootstrap,
            coordination_topic=topics.coordination,
            heartbeat_interval=topics.interval_s,
        ) as cluster:
            member = await cluster.member("a", topics.group)
            async with member.consumer(topics.work, claims="greedy") as consumer:
                await consumer.wait_for_claims(2)
                seen = []
                async for message in consumer:
                    seen.append(int(message.payload or b""))
                    message.commit()
                    if len(seen) == 6:
                        break
                assert sorted(seen) == list(range(6))
                # What a cancelled poll would have returned is returned by the next one.
                waiting = asyncio.create_task(consumer.receive(within(30.0)))
                await asyncio.sleep(0.2)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                topics.fill(1, first=6)
                late = await consumer.receive(within(30.0))
                assert late is not None
                assert late.payload == b"6"
                late.commit()
                await consumer.flush()
                admin = Admin(cluster, topics.group)
                moved = await admin.set_position({(topics.work, 0): 3, (topics.work, 1): "latest"})
                assert moved == {(topics.work, 0): 3, (topics.work, 1): 3}
                assert await admin.paused_until() == await cluster.paused_until(topics.group) == 0
                again = await consumer.receive(within(30.0))
                assert again is not None
                assert again.payload == b"6"
                again.commit()
            async with member.consumer(topics.work, delivery="at-most-once") as consumer:
                topics.fill(2, first=7)
                found = []
                async for batch in consumer.batches(timeout=within(30.0)):
                    assert await member.claimed(batch.topic, batch.partition)
                    async with consumer.transaction(batch) as outputs:
                        for message in batch.messages:
                            outputs.send(output, message.payload)
                            found.append(message.payload)
                    if len(found) == 2:
                        break
                assert sorted(found) == [b"7", b"8"]

                async def fail(batch: Batch) -> None:
                    async with consumer.transaction(batch) as outputs:
                        outputs.send(output, b"aborted")
                        raise ZeroDivisionError

                with pytest.raises(ZeroDivisionError):
                    await fail(batch)
            written = [value for _, _, _, value in read_topic(bootstrap, output)]
            assert sorted(written) == [b"7", b"8"]
            assert all(not claim.client for claim in await cluster.claims(topics.group))

    asyncio.run(asyncio.wait_for(run(), within(120.0)))


def test_ranges_with_asyncio(bootstrap: str) -> None:
    topics = ClaimTopics(bootstrap, partitions=1)
    topics.fill(30)

    def member(name: str) -> RangeClaims:
        return RangeClaims(
            bootstrap,
            topics.work,
            client_id=name,
            group_id=topics.group,
            size=10,
            range_topic=topics.coordination,
            heartbeat_interval=topics.interval_s,
        )

    async def run() -> None:
        seen: list[int] = []
        with pytest.raises(StateError, match="await"):
            member("a").held()
        async with member("a") as ranges:
            async for claimed in ranges:
                assert (claimed.topic, claimed.partition) == (topics.work, 0)
                async for message in claimed:
                    assert message.token == claimed.token
                    seen.append(int(message.payload or b""))
                assert claimed.position == claimed.next
                await claimed.done()
                if len(seen) == 30:
                    break
            assert seen == list(range(30))
            # What a cancelled wait would have returned is returned by the next one.
            waiting = asyncio.create_task(ranges.next_range(30.0))
            await asyncio.sleep(0.2)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            topics.fill(4, first=30)
            late = await ranges.next_range(30.0)
            assert late is not None
            assert (late.first, late.next) == (30, 40)
            found = []
            async for message in late:
                found.append(message.payload)
                if len(found) == 4:
                    break
            assert found == [b"30", b"31", b"32", b"33"]
            await late.done()
            assert late.first == 34
            assert ranges.held()
        async with member("b") as ranges:
            rest = await ranges.next_range(0.5)
            assert rest is None  # of 34-40 nothing is written yet
            topics.fill(1, first=34)
            rest = await ranges.next_range(30.0)
            assert rest is not None
            assert (rest.first, rest.next) == (34, 40)

    asyncio.run(asyncio.wait_for(run(), within(120.0)))
