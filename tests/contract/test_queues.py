"""What a queue promises, on every backend and in memory: messages, verdicts, dead letters."""

from __future__ import annotations

import time

import pytest
from tests.contract.worlds import World, receive
from tests.waiting import wait_until, within

from kafkamq import ConfigError, OutgoingDeadLetter, StateError
from kafkamq.metrics import Histogram, families
from kafkamq.queue.rules.capabilities import Feature


def test_verdicts(world: World) -> None:
    """Isolation, ack, nack, reject, extend, delivery counts and dead letters."""
    queue, other = world.queue("a"), world.queue("b")
    other.producer().send(b"of b")
    with queue.producer() as producer:
        for name in ("ack", "nack", "reject", "poison"):
            producer.send(name.encode(), key=f"k-{name}", headers={"h": b"\x00\xff"}, id=name)
    other.producer().flush()
    with queue.consumer(ordering="unordered") as consumer:
        by_id = {message.id: message for message in receive(consumer, 4)}
        assert set(by_id) == {"ack", "nack", "reject", "poison"}
        for name, message in by_id.items():
            assert message.payload == name.encode()
            assert message.key == f"k-{name}".encode()
            assert dict(message.headers) == {"h": b"\x00\xff"}
            assert (message.queue_id, message.delivery_count) == ("a", 1)
        if world.has(Feature.EXTEND):
            by_id["ack"].extend(5.0)
        else:
            with pytest.raises(ConfigError, match="markers, offsets and claims have it"):
                by_id["ack"].extend(5.0)
        by_id["ack"].ack()
        with pytest.raises(StateError):
            by_id["ack"].ack()
        by_id["reject"].reject("no good")
        by_id["nack"].nack(reason="not yet")
        by_id["poison"].nack(reason="first")
        with pytest.raises(ValueError, match="never"), receive_named(consumer, "nack", 2):
            raise ValueError("never")

        def have_died() -> bool:
            for message in consumer.receive_many(4, 0.5):
                message.nack(reason="again")
            return len(world.letters(queue)) == 3

        wait_until(have_died, "the dead letters")
        consumer.flush()
    letters = {(letter.payload or b"").decode(): letter for letter in world.letters(queue)}
    assert (letters["reject"].reason, letters["reject"].error) == ("rejected", "no good")
    assert letters["reject"].delivery_count == 1
    assert (letters["poison"].reason, letters["poison"].error) == ("max-deliveries", "again")
    assert letters["poison"].delivery_count == 3
    assert letters["poison"].key == b"k-poison"
    assert letters["poison"].headers["h"] == b"\x00\xff"
    assert letters["nack"].error == "again"
    with other.consumer() as consumer:
        (message,) = receive(consumer, 1)
        assert message.payload == b"of b"
        message.ack(wait=True)


def receive_named(consumer, name: str, count: int):
    """The next delivery of one message; what else comes is nacked."""
    while True:
        for message in receive(consumer, 1):
            if message.id == name:
                assert message.delivery_count == count
                return message
            message.nack(reason="again")


def test_keys_and_payloads_are_anything(world: World) -> None:
    queue = world.queue("anything")
    keys = [None, "schlüssel-鍵".encode(), b"\x00\x01\xff", b""]
    payloads = [b"", None, b"\x00" * 1_000_000, "käse".encode()]
    sent = [(key, payload) for key in keys for payload in payloads]
    with queue.producer() as producer:
        for key, payload in sent:
            producer.send(payload, key=key)
    found = []
    with queue.consumer() as consumer:
        while len(found) < len(sent):
            for message in receive(consumer, 1):
                found.append((message.key, message.payload))
                message.ack()
        consumer.flush()
    assert sorted(found, key=repr) == sorted(sent, key=repr)


@pytest.mark.parametrize("world", ["memory-offsets", "offsets"], indirect=True)
def test_messages_without_a_key_wait_for_nobody(world: World) -> None:
    queue = world.queue("keyless")
    with queue.producer() as producer:
        for number in range(20):  # more than there are partitions
            producer.send(b"%d" % number)
    with queue.consumer() as consumer:
        held = receive(consumer, 20)
        assert {message.payload for message in held} == {b"%d" % number for number in range(20)}
        for message in held:
            message.ack()
        consumer.flush()


def test_what_was_not_handed_out_is_released(world: World) -> None:
    """Closing in the middle: nothing is lost, and what nobody saw is delivered for the first time.

    On ``share`` it is counted by the broker all the same.
    """
    queue = world.queue("released")
    with queue.producer() as producer:
        for number in range(20):
            producer.send(b"%d" % number)
    with queue.consumer() as consumer:
        message = consumer.receive(within(60.0))
        assert message is not None
        message.ack(wait=True)
    seen = {message.payload}
    with queue.consumer() as consumer:
        while len(seen) < 20:
            for message in receive(consumer, 1):
                assert message.payload not in seen
                assert message.delivery_count == 1 or world.backend == "share"
                seen.add(message.payload)
                message.ack()
        consumer.flush()
    with queue.consumer() as consumer:
        assert consumer.receive_many(10, 0.5) == []


def test_dead_letters_go_where_the_queues_own_writer_puts_them(world: World) -> None:
    """Also what it could not keep at first; nothing goes to Kafka."""

    class Shelf:
        refusals = 2
        letters: list[OutgoingDeadLetter] = []  # noqa: RUF012 - of the one test

        def write(self, letter: OutgoingDeadLetter) -> None:
            if self.refusals:
                self.refusals -= 1
                raise ConnectionError("nobody there")
            self.letters.append(letter)

    shelf = Shelf()
    if not world.has(Feature.OWN_DEAD_LETTERS):
        with pytest.raises(ConfigError, match="the tracker writes them in its transactions"):
            world.queue("elsewhere", dead_letter_writer=shelf)
        return
    queue = world.queue("elsewhere", dead_letter_writer=shelf)
    queue.producer().send(b"x", key="k", headers={"h": b"1"}, id="one").result(within(30))
    with queue.consumer(ordering="unordered") as consumer:
        (message,) = receive(consumer, 1)
        message.reject("no good")
        wait_until(lambda: shelf.letters, "the dead letter")
        consumer.flush()
        assert consumer.receive_many(1, 0.5) == []
    (letter,) = shelf.letters
    assert (letter.payload, letter.key, letter.queue_id) == (b"x", b"k", "elsewhere")
    assert (letter.reason.value, letter.error, letter.delivery_count) == ("rejected", "no good", 1)
    assert dict(letter.headers) == {"h": b"1", "kafkamq-id": b"one"}
    place = message.message_id
    assert (letter.origin.partition, letter.origin.offset) == (place.partition, place.offset)
    assert world.letters(queue) == []


def test_what_a_backend_lacks_is_refused(world: World) -> None:
    queue = world.queue("refused")
    producer = queue.producer()
    if not world.has(Feature.DELAYED_SEND):
        with pytest.raises(ConfigError, match="markers has it"):
            producer.send(b"x", delay=1.0)
    if not world.has(Feature.TTL):
        with pytest.raises(ConfigError, match="markers has it"):
            producer.send(b"x", ttl=1.0)
    if not world.has(Feature.KEY_ORDER):
        with pytest.raises(ConfigError, match="offsets has it"):
            queue.handler(ordering="key")(print)
    if not world.has(Feature.RETRY_DELAY):
        producer.send(b"x").result(within(30))
        with queue.consumer() as consumer:
            (message,) = receive(consumer, 1)
            with pytest.raises(ConfigError, match="markers, offsets and claims have it"):
                message.nack(delay=5.0)
            message.ack(wait=True)


def test_the_age_of_each_record_is_observed_when_it_is_first_handed_out(world: World) -> None:
    queue = world.queue("ages", redelivery_timeout=60.0)

    def observed() -> tuple[int, float]:
        (family,) = (each for each in families() if each.name == "kafkamq_send_to_receive_seconds")
        assert isinstance(family, Histogram)
        found = family.distributions().get(("ages",))
        return (sum(found.counts), found.total) if found else (0, 0.0)

    count_before, total_before = observed()
    began_s = time.time()
    with queue.producer() as producer:
        for number in range(50):
            producer.send(b"%d" % number, key=f"key-{number % 7}")
    with queue.consumer(ordering="unordered") as consumer:
        messages = [*receive(consumer, 1), *receive(consumer, 1)]
        while len(messages) < 50:
            messages += consumer.receive_many(20, within(30))
        count, total = observed()
        assert count - count_before == 50
        # No record is older than this test; its time is in whole milliseconds.
        assert 0 <= total - total_before <= 50 * (time.time() - began_s + 0.001)
        if world.backend != "markers":  # whose next delivery is another record, the tracker's copy
            messages[0].nack(reason="not yet")
            (again,) = receive(consumer, 1)
            assert again.delivery_count == 2
            messages[0] = again
        for message in messages:
            message.ack()
        consumer.flush()
        if world.backend != "markers":
            assert observed()[0] - count_before == 50
    assert observed()[0] - count_before == 50
