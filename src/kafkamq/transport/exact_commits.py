"""Commits offsets, and reads what is committed, with metadata byte for byte.

confluent-kafka (2.16) sends the metadata of a commit with the NUL that ends its C string: whoever
decodes base64 strictly, as Java does, then drops it. So the list of offsets is built here with its
true lengths and given to librdkafka's own C functions, for the client that confluent-kafka made.
And so it is read: where no NUL was committed, confluent-kafka reads on in whatever memory follows.

Where that client lives is not part of any interface: it is looked up in the Python object, read as
memory (never as a pointer that might not be one) and must hold the client's unique name. So it is
done only where it is asked for. Without it, and where it fails - another operating system, another
layout - commits go the ordinary way (``transport.plain_commits``); ``is_exact`` says so.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from confluent_kafka import Consumer as _Consumer
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Producer as _Producer

from kafkamq.transport.errors import broker_error
from kafkamq.transport.plain_commits import OffsetCommit, PlainCommits, plain
from kafkamq.transport.port import Consumer, Producer

__all__ = ["ExactCommits", "OffsetCommit"]

_log = logging.getLogger(__name__)
_NAME_WITHIN = 16 * 1024  # bytes of the client's structure that are looked through
_ERROR_BYTES = 512


class _Partition(ctypes.Structure):
    """``rd_kafka_topic_partition_t``: part of librdkafka's stable interface."""

    _fields_ = (
        ("topic", ctypes.c_char_p),
        ("partition", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("metadata", ctypes.c_void_p),
        ("metadata_size", ctypes.c_size_t),
        ("opaque", ctypes.c_void_p),
        ("error", ctypes.c_int),
        ("private", ctypes.c_void_p),
    )


class _PartitionList(ctypes.Structure):
    """``rd_kafka_topic_partition_list_t``."""

    _fields_ = (
        ("count", ctypes.c_int),
        ("size", ctypes.c_int),
        ("elements", ctypes.POINTER(_Partition)),
    )


_List = ctypes.POINTER(_PartitionList)


class _Library:
    """The functions of the librdkafka that is loaded in this process."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        for name, result, arguments in (
            ("rd_kafka_name", text, (pointer,)),
            ("rd_kafka_topic_partition_list_new", _List, (ctypes.c_int,)),
            (
                "rd_kafka_topic_partition_list_add",
                ctypes.POINTER(_Partition),
                (_List, text, ctypes.c_int32),
            ),
            ("rd_kafka_topic_partition_list_destroy", None, (_List,)),
            ("rd_kafka_commit", ctypes.c_int, (pointer, _List, ctypes.c_int)),
            ("rd_kafka_committed", ctypes.c_int, (pointer, _List, ctypes.c_int)),
            ("rd_kafka_mem_malloc", pointer, (pointer, ctypes.c_size_t)),
            ("rd_kafka_mem_free", None, (pointer, pointer)),
            ("rd_kafka_consumer_group_metadata", pointer, (pointer,)),
            (
                "rd_kafka_consumer_group_metadata_write",
                pointer,
                (pointer, ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_size_t)),
            ),
            (
                "rd_kafka_consumer_group_metadata_read",
                pointer,
                (ctypes.POINTER(pointer), text, ctypes.c_size_t),
            ),
            ("rd_kafka_consumer_group_metadata_destroy", None, (pointer,)),
            (
                "rd_kafka_send_offsets_to_transaction",
                pointer,
                (pointer, _List, pointer, ctypes.c_int),
            ),
            ("rd_kafka_error_code", ctypes.c_int, (pointer,)),
            ("rd_kafka_error_string", text, (pointer,)),
            ("rd_kafka_error_is_fatal", ctypes.c_int, (pointer,)),
            ("rd_kafka_error_is_retriable", ctypes.c_int, (pointer,)),
            ("rd_kafka_error_txn_requires_abort", ctypes.c_int, (pointer,)),
            ("rd_kafka_error_destroy", None, (pointer,)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("rd_kafka_"), function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(name)  # set above; this is for the type checker


class ExactCommits:
    """Commits for one consumer; calls may come from any thread, but none after its ``close``."""

    def __init__(
        self,
        consumer: Consumer,
        client_id: str,
        ordinary: PlainCommits | None = None,
        *,
        is_wanted: bool = True,
    ) -> None:
        self._consumer = consumer
        self._plain = ordinary or PlainCommits()
        self._plain.open(consumer)
        self._library: _Library | None = None
        self._handle = 0
        self._is_memory = not isinstance(consumer, _Consumer)  # whose own commits are exact
        if self._is_memory or not is_wanted:
            return
        try:
            library = _Library(_library_path())
            self._handle = _handle_of(consumer, client_id, library)
            self._library = library
        except (OSError, AttributeError, ValueError) as error:
            _log.warning(
                "exact commit metadata is not to be had here: commits carry a trailing NUL, which"
                " Parallel Consumer for Java cannot read",
                extra={"error": str(error)},
            )

    @property
    def is_exact(self) -> bool:
        """Whether the metadata is committed as given, and read as committed."""
        return not self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether a NUL follows it, and it is read up to one."""
        return not self._is_memory and self._library is None

    def commit(self, commits: Sequence[OffsetCommit]) -> None:
        """Commit and wait for the answer (up to ``socket.timeout.ms``); raises the first error."""
        library = self._library
        if self._is_memory:
            for each in self._consumer.commit(offsets=plain(commits), asynchronous=False):
                if each.error is not None:
                    raise KafkaException(each.error)
            return
        if library is None:
            self._plain.commit(commits)
            return
        listed = _listed(library, self._handle, commits)
        try:
            code = library.commit(self._handle, listed, 0)
            if code:
                raise KafkaException(KafkaError(code))
            content = listed.contents
            for index in range(content.count):
                if content.elements[index].error:
                    raise KafkaException(KafkaError(content.elements[index].error))
        finally:
            library.topic_partition_list_destroy(listed)

    def committed(
        self, partitions: Sequence[tuple[str, int]], timeout_s: float
    ) -> list[OffsetCommit]:
        """What the group has committed; a negative offset: nothing."""
        try:
            return self._committed(partitions, timeout_s)
        except KafkaException as error:
            raise broker_error(error, "finding what the group has committed") from error

    def _committed(
        self, partitions: Sequence[tuple[str, int]], timeout_s: float
    ) -> list[OffsetCommit]:
        library = self._library
        if library is None:
            return self._plain.committed(partitions, timeout_s)
        asked = [OffsetCommit(topic, number, -1) for topic, number in partitions]
        listed = _listed(library, self._handle, asked)
        try:
            code = library.committed(self._handle, listed, int(timeout_s * 1000))
            if code:
                raise KafkaException(KafkaError(code))
            content = listed.contents
            found = [content.elements[index] for index in range(content.count)]
            for each in found:
                if each.error:
                    raise KafkaException(KafkaError(each.error))
            return [
                OffsetCommit(each.topic.decode(), each.partition, each.offset, _metadata(each))
                for each in found
            ]
        finally:
            library.topic_partition_list_destroy(listed)

    def serve(self) -> None:
        """Where commits are not exact: begin those that wait; by the thread that polls."""
        if self.is_plain:
            self._plain.serve()

    def inside(self) -> AbstractContextManager[None]:
        """Around calls of the client that make callbacks."""
        return self._plain.inside()

    def tend(self) -> None:
        """In the thread that polls, while it waits for a commit: begin it without a poll."""
        if self.is_plain:
            self._plain.tend()

    def note_group(self) -> None:
        """Where commits are not exact: remember the member for ``group``; as ``serve``."""
        if self.is_plain:
            self._plain.note_group()

    def group(self) -> bytes:
        """The member as of now: its group, name and generation.

        What is committed with it is refused when the member is another one by then.
        """
        library = self._library
        if self._is_memory:
            known: bytes = self._consumer.consumer_group_metadata()
            return known
        if library is None:
            return self._plain.group()
        # Not confluent-kafka's method: it lets no other thread in while one polls all the time.
        member = library.consumer_group_metadata(self._handle)
        buffer, size = ctypes.c_void_p(), ctypes.c_size_t()
        try:
            error = library.consumer_group_metadata_write(
                member, ctypes.byref(buffer), ctypes.byref(size)
            )
            if error:
                raise KafkaException(_taken(library, error))
            found = ctypes.string_at(buffer, size.value)
            library.mem_free(self._handle, buffer)
            return found
        finally:
            library.consumer_group_metadata_destroy(member)

    def send_to_transaction(
        self,
        producer: Producer,
        client_id: str,
        commits: Sequence[OffsetCommit],
        group: bytes,
        timeout_s: float,
    ) -> None:
        """Commit in the open transaction; ``group`` was read before it was seen what is done."""
        library = self._library
        handle = 0
        if not isinstance(producer, _Producer):
            library = None
        if library is not None:
            try:
                handle = _handle_of(producer, client_id, library)
            except (OSError, ValueError):
                library = None
        if not group:  # Kafka would take the offsets from anybody
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_MEMBER_ID))
        if library is None:
            producer.send_offsets_to_transaction(plain(commits), group, timeout_s)
            return
        member = ctypes.c_void_p()
        error = library.consumer_group_metadata_read(ctypes.byref(member), group, len(group))
        if error:
            raise KafkaException(_taken(library, error))
        listed = _listed(library, handle, commits)
        try:
            error = library.send_offsets_to_transaction(
                handle, listed, member, int(timeout_s * 1000)
            )
            if error:
                raise KafkaException(_taken(library, error))
        finally:
            library.consumer_group_metadata_destroy(member)
            library.topic_partition_list_destroy(listed)


def _metadata(element: _Partition) -> str:
    """To its length, not to a NUL that may not be there."""
    if not element.metadata or not element.metadata_size:
        return ""
    data = ctypes.string_at(element.metadata, element.metadata_size)
    return data.decode("utf-8", "replace")


def _listed(
    library: _Library, handle: int, commits: Sequence[OffsetCommit]
) -> ctypes._Pointer[_PartitionList]:
    """A list that librdkafka owns, metadata and all, until it is destroyed."""
    listed: ctypes._Pointer[_PartitionList] = library.topic_partition_list_new(len(commits))
    for each in commits:
        element = library.topic_partition_list_add(
            listed, each.topic.encode(), each.partition
        ).contents
        element.offset = each.offset
        if each.metadata:
            data = each.metadata.encode()
            memory = library.mem_malloc(handle, len(data) + 1)
            ctypes.memmove(memory, data + b"\0", len(data) + 1)
            element.metadata, element.metadata_size = memory, len(data)
    return listed


def _taken(library: _Library, error: int) -> KafkaError:
    """Librdkafka's error as confluent-kafka's; the former is destroyed."""
    try:
        error_text = library.error_string(error) or b""
        return KafkaError(
            library.error_code(error),
            error_text[:_ERROR_BYTES].decode("utf-8", "replace"),
            bool(library.error_is_fatal(error)),
            bool(library.error_is_retriable(error)),
            bool(library.error_txn_requires_abort(error)),
        )
    finally:
        library.error_destroy(error)


def _library_path() -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.search(r"(/\S*librdkafka[^/]*)$", line)
        if found:
            return found.group(1)
    raise OSError("no librdkafka is loaded as a library of its own")


def _handle_of(client: Consumer | Producer, client_id: str, library: _Library) -> int:
    """The ``rd_kafka_t`` of a client: the first field behind the object's head."""
    address = ctypes.c_void_p.from_address(id(client) + object.__basicsize__).value or 0
    name = client_id.encode() + b"#"
    descriptor = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        memory = os.pread(descriptor, _NAME_WITHIN, address)
    finally:
        os.close(descriptor)
    if name not in memory:
        raise ValueError("confluent-kafka keeps its client elsewhere than expected")
    if not (library.name(address) or b"").startswith(name):
        raise ValueError("librdkafka names another client than expected")
    return address
