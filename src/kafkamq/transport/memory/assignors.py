"""Who gets which partitions: the assignors that librdkafka and the brokers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kafkamq.transport.memory.log import Place

Assignment = dict[str, set[Place]]
"""By member."""


def assign(
    strategy: str,
    counts: Mapping[str, int],
    topics: Mapping[str, Sequence[str]],
    owned: Mapping[str, set[Place]],
) -> Assignment:
    """Spread partitions over members."""
    if strategy == "range":
        return _range(counts, topics)
    if strategy == "roundrobin":
        return _sticky(counts, topics, {})
    return _sticky(counts, topics, owned)


def _range(counts: Mapping[str, int], topics: Mapping[str, Sequence[str]]) -> Assignment:
    found: Assignment = {member: set() for member in topics}
    for topic, count in counts.items():
        members = sorted(member for member, wanted in topics.items() if topic in wanted)
        first = 0
        for index, member in enumerate(members):
            share = count // len(members) + (index < count % len(members))
            found[member].update((topic, number) for number in range(first, first + share))
            first += share
    return found


def _sticky(
    counts: Mapping[str, int], topics: Mapping[str, Sequence[str]], owned: Mapping[str, set[Place]]
) -> Assignment:
    places = [(topic, number) for topic in sorted(counts) for number in range(counts[topic])]
    found: Assignment = {member: set() for member in sorted(topics)}
    free = []
    for place in places:
        able = [member for member in found if place[0] in topics[member]]
        keeper = next((each for each in able if place in owned.get(each, ())), None)
        if keeper is not None:
            found[keeper].add(place)
        elif able:
            free.append((place, able))
    for place, able in free:
        found[min(able, key=lambda member: len(found[member]))].add(place)
    for place in places:  # the first ones move, as librdkafka has it
        able = [member for member in found if place[0] in topics[member]]
        holder = next((member for member in able if place in found[member]), None)
        if holder is None:
            continue
        least = min(able, key=lambda member: len(found[member]))
        if len(found[holder]) - len(found[least]) > 1:
            found[holder].remove(place)
            found[least].add(place)
    return found
