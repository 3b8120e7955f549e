"""`KafkaCluster`: three real brokers, each on a machine of its own, and what can happen to them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from harness.network import Network
from kafkamq.dev.artifacts import DEFAULT_VERSION
from kafkamq.dev.broker import Listener, LocalKafka, Node, new_cluster_id
from kafkamq.errors import DeadlineExceededError, StateError

_PROPERTIES = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
    # A follower that stands still holds acks=all up for so long: 30 s by default.
    "replica.lag.time.max.ms": "4000",
    "group.min.session.timeout.ms": "3000",
}
_READY_S = 90.0
T = TypeVar("T")


class KafkaCluster:
    """Three brokers that are controllers too, replication 3, min ISR 2; a context manager.

    Brokers are numbered from 1. Clients of this process reach all of them, by the addresses of a
    network that only this machine has. One thread controls it.
    """

    def __init__(
        self,
        version: str = DEFAULT_VERSION,
        *,
        brokers: int = 3,
        properties: Mapping[str, str] | None = None,
        listeners: Callable[[int], Sequence[Listener]] = lambda node_id: (),
        disks: Mapping[int, int] | None = None,
        launcher: Sequence[str] = (),
        heap: str = "256m",
        cache_dir: Path | str | None = None,
        java: str = "java",
    ) -> None:
        """Makes the network and describes the brokers; `start` or ``with`` starts them.

        Args:
            version: Of Kafka.
            brokers: How many.
            properties: Broker properties over our defaults.
            listeners: More doors of a broker, by its number.
            disks: Bytes of a small disk for the data of a broker, by its number.
            launcher: A command that Java's is appended to.
            heap: The largest heap of each.
            cache_dir: As for `LocalKafka`.
            java: As for `LocalKafka`.
        """
        self.network = Network()
        cluster_id = new_cluster_id()
        numbers = range(1, brokers + 1)
        for number in numbers:
            self.network.add(_name(number))
        self._folder = Path(tempfile.mkdtemp(prefix="kafkamq-cluster-"))
        hosts = {number: self.network.hosts[_name(number)] for number in numbers}
        voters = {number: f"{host.address}:9093" for number, host in hosts.items()}
        for number in numbers:
            (self._folder / _name(number) / "data").mkdir(parents=True)
        for number, size_bytes in (disks or {}).items():
            hosts[number].mount_tmpfs(self._disk_of(number), size_bytes)
        self._brokers = {
            number: LocalKafka(
                version,
                data_dir=self._folder / _name(number),
                properties={**_PROPERTIES, **(properties or {})},
                listeners=listeners(number),
                node=Node(node_id=number, host=host.address, voters=voters, cluster_id=cluster_id),
                launcher=[*host.prefix, *launcher],
                heap=heap,
                cache_dir=cache_dir,
                java=java,
                start_timeout=_READY_S,
            )
            for number, host in hosts.items()
        }
        self._paused: set[int] = set()

    # What it is

    @property
    def brokers(self) -> Mapping[int, LocalKafka]:
        return self._brokers

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(broker.bootstrap_servers for broker in self._brokers.values())

    def leader_of(self, topic: str, partition: int = 0, *, timeout_s: float = 30.0) -> int:
        """Return the number of the broker that leads a partition now.

        Raises:
            DeadlineExceededError: nobody does.
        """

        def found() -> int:
            metadata = self._admin().list_topics(topic, timeout=5)
            return metadata.topics[topic].partitions[partition].leader

        return self._ask(found, lambda leader: leader in self._brokers, timeout_s)

    def coordinator_of(self, group_id: str, *, timeout_s: float = 30.0) -> int:
        """Return the number of the broker that coordinates a group."""

        def found() -> int:
            admin = self._admin()  # kept: its futures end with it
            futures = admin.describe_consumer_groups([group_id], request_timeout=5)
            node = futures[group_id].result(10).coordinator
            return -1 if node is None else int(node.id)

        return self._ask(found, lambda number: number in self._brokers, timeout_s)

    def controller(self, *, timeout_s: float = 30.0) -> int:
        """Return the number of the broker whose controller leads."""

        def found() -> int:
            admin = self._admin()  # kept: its futures end with it
            return int(admin.describe_cluster(request_timeout=5).result(10).controller.id)

        return self._ask(found, lambda number: number in self._brokers, timeout_s)

    def wait_until_whole(self, *, timeout_s: float = _READY_S) -> None:
        """Wait until all brokers are there and all replicas are in sync.

        Raises:
            DeadlineExceededError: they are not.
        """

        def is_whole() -> bool:
            metadata = self._admin().list_topics(timeout=5)
            return len(metadata.brokers) == len(self._brokers) and all(
                len(partition.isrs) == len(partition.replicas) and partition.leader >= 0
                for topic in metadata.topics.values()
                for partition in topic.partitions.values()
            )

        self._ask(is_whole, lambda whole: whole, timeout_s)

    # Its life

    def start(self) -> KafkaCluster:
        """Start all brokers; returns when each knows the others."""
        try:
            with ThreadPoolExecutor(len(self._brokers)) as threads:
                for future in [threads.submit(b.start) for b in self._brokers.values()]:
                    future.result()
            self.wait_until_whole()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the brokers, without mercy: their data goes as well; and the network."""
        for broker in self._brokers.values():
            with contextlib.suppress(StateError):
                broker.kill()
            broker.stop()
        self.network.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> KafkaCluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # What can happen to it

    def fill_disk(self, number: int) -> None:
        """Write a file onto a broker's small disk until it is full."""
        filler = self._disk_of(number) / "filler"
        write = f"dd if=/dev/zero of={filler} bs=4k 2>/dev/null; test -s {filler}"
        self.network.hosts[_name(number)].run("sh", "-c", write)

    def free_disk(self, number: int) -> None:
        self.network.hosts[_name(number)].run("rm", "-f", str(self._disk_of(number) / "filler"))

    def kill(self, number: int) -> None:
        """SIGKILL: a crash. `heal` or `restart` brings it back."""
        self._brokers[number].kill()
        self._paused.discard(number)

    def restart(self, number: int) -> None:
        """Start a killed broker again; stop one that runs cleanly first."""
        self._brokers[number].restart()

    def pause(self, number: int) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        self._brokers[number].pause()
        self._paused.add(number)

    def cut(self, one: int, other: int) -> None:
        """Nothing goes between two brokers; clients reach both."""
        self.network.cut(_name(one), _name(other))

    def cut_from_peers(self, number: int) -> None:
        """Cut a broker from all others; clients still reach it."""
        for other in self._brokers:
            if other != number:
                self.cut(number, other)

    def cut_from_clients(self, number: int) -> None:
        """Cut a broker from this process's machine; its peers still reach it."""
        self.network.cut(_name(number), "")

    def isolate(self, number: int) -> None:
        """Cut a broker from everybody."""
        self.network.isolate(_name(number))

    def heal(self, *, timeout_s: float = _READY_S) -> None:
        """End all faults: routes, pauses, killed brokers; returns when all replicas are in sync."""
        self.network.heal()
        for number in list(self._paused):
            self._brokers[number].resume()
            self._paused.discard(number)
        for broker in self._brokers.values():
            if not broker.is_running:
                broker.start()
        self.wait_until_whole(timeout_s=timeout_s)

    # How it is done

    def _disk_of(self, number: int) -> Path:
        return self._folder / _name(number) / "data"

    def _admin(self) -> AdminClient:
        """Return a new one each time: one that met a fault may take its time."""
        return AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})

    def _ask(
        self, question: Callable[[], T], is_answer: Callable[[T], bool], timeout_s: float
    ) -> T:
        deadline_s = time.monotonic() + timeout_s
        last: object = None
        while time.monotonic() < deadline_s:
            try:
                answer = question()
            except (KafkaException, KeyError) as error:
                last = error
            else:
                if is_answer(answer):
                    return answer
                last = answer
            time.sleep(0.1)
        raise DeadlineExceededError(
            f"the cluster is not as it should be after {timeout_s:g} s: {last}"
        )


def _name(number: int) -> str:
    return f"broker-{number}"
