# The compiler writes a bare Mapping where a mapping of fields is taken.
# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MarkerType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    START: _ClassVar[MarkerType]
    END: _ClassVar[MarkerType]
    KEEPALIVE: _ClassVar[MarkerType]
    SCHEDULE: _ClassVar[MarkerType]
    TICK: _ClassVar[MarkerType]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACK: _ClassVar[Outcome]
    NACK: _ClassVar[Outcome]
    REJECT: _ClassVar[Outcome]
    REDELIVERED: _ClassVar[Outcome]
    DEAD_LETTERED: _ClassVar[Outcome]
    RELEASE: _ClassVar[Outcome]
    ALREADY_ENDED: _ClassVar[Outcome]
START: MarkerType
END: MarkerType
KEEPALIVE: MarkerType
SCHEDULE: MarkerType
TICK: MarkerType
ACK: Outcome
NACK: Outcome
REJECT: Outcome
REDELIVERED: Outcome
DEAD_LETTERED: Outcome
RELEASE: Outcome
ALREADY_ENDED: Outcome

class MessageId(_message.Message):
    __slots__ = ("partition", "offset", "topic_id", "leader_epoch")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    partition: int
    offset: int
    topic_id: bytes
    leader_epoch: int
    def __init__(self, partition: _Optional[int] = ..., offset: _Optional[int] = ..., topic_id: _Optional[bytes] = ..., leader_epoch: _Optional[int] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class MessageBatch(_message.Message):
    __slots__ = ("partition", "base_offset", "runs", "bitmap", "topic_id", "leader_epoch")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    BASE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    partition: int
    base_offset: int
    runs: _containers.RepeatedScalarFieldContainer[int]
    bitmap: bytes
    topic_id: bytes
    leader_epoch: int
    def __init__(self, partition: _Optional[int] = ..., base_offset: _Optional[int] = ..., runs: _Optional[_Iterable[int]] = ..., bitmap: _Optional[bytes] = ..., topic_id: _Optional[bytes] = ..., leader_epoch: _Optional[int] = ...) -> None: ...

class Marker(_message.Message):
    __slots__ = ("version", "type", "message_id", "redeliver_after_ms", "key", "value", "delivery_count", "headers", "expires_at_ms", "consumer_id", "message_timestamp_ms", "by_reference", "outcome", "reason", "null_value", "max_deliveries", "max_lease_ms", "carried_forward", "of_schedule", "engine_epoch", "batches", "message_topic")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    REDELIVER_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    BY_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NULL_VALUE_FIELD_NUMBER: _ClassVar[int]
    MAX_DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FORWARD_FIELD_NUMBER: _ClassVar[int]
    OF_SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TOPIC_FIELD_NUMBER: _ClassVar[int]
    version: int
    type: MarkerType
    message_id: MessageId
    redeliver_after_ms: int
    key: bytes
    value: bytes
    delivery_count: int
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    expires_at_ms: int
    consumer_id: str
    message_timestamp_ms: int
    by_reference: bool
    outcome: Outcome
    reason: str
    null_value: bool
    max_deliveries: int
    max_lease_ms: int
    carried_forward: bool
    of_schedule: bool
    engine_epoch: int
    batches: _containers.RepeatedCompositeFieldContainer[MessageBatch]
    message_topic: str
    def __init__(self, version: _Optional[int] = ..., type: _Optional[_Union[MarkerType, str]] = ..., message_id: _Optional[_Union[MessageId, _Mapping]] = ..., redeliver_after_ms: _Optional[int] = ..., key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., delivery_count: _Optional[int] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., expires_at_ms: _Optional[int] = ..., consumer_id: _Optional[str] = ..., message_timestamp_ms: _Optional[int] = ..., by_reference: bool = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[str] = ..., null_value: bool = ..., max_deliveries: _Optional[int] = ..., max_lease_ms: _Optional[int] = ..., carried_forward: bool = ..., of_schedule: bool = ..., engine_epoch: _Optional[int] = ..., batches: _Optional[_Iterable[_Union[MessageBatch, _Mapping]]] = ..., message_topic: _Optional[str] = ...) -> None: ...
