"""What makes a handler's body of a payload, in the place of its annotation alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from kafkamq.errors import ConfigError, SchemaRegistryError
from kafkamq.queue.json_values import BodyError

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]


@runtime_checkable
class Deserializer(Protocol):
    """Reads payloads; thread-safe, and with ``processes=`` it can be pickled."""

    def deserialize(self, payload: bytes, headers: Headers = ()) -> Any:
        """The body.

        Raises:
            BodyError: The payload is not what it should be: its message is rejected.
            SchemaRegistryError: What is needed to read it is not there now: its message waits.
        """

    def is_ready(self, payload: bytes, headers: Headers = ()) -> bool:
        """Whether ``deserialize`` asks nobody, and so never waits."""


class BodyUnavailableError(SchemaRegistryError):
    """A body could not be read for want of the registry: no attempt of the message's."""


class _Function:
    """A function of the payload as a deserializer."""

    def __init__(self, function: Callable[[bytes], Any]) -> None:
        self._function = function

    def deserialize(self, payload: bytes, headers: Headers = ()) -> Any:
        del headers
        try:
            return self._function(payload)
        except (BodyError, SchemaRegistryError):
            raise
        except Exception as error:  # noqa: BLE001 - of the user's own function
            raise BodyError(f"the deserializer refused it: {type(error).__name__}") from None

    def is_ready(self, payload: bytes, headers: Headers = ()) -> bool:
        del payload, headers
        return True


def deserializer_of(given: object) -> Deserializer | None:
    """What a user gave as ``deserializer``: one, a function of the payload, or None."""
    if given is None or isinstance(given, Deserializer):
        return given
    if not callable(given):
        raise ConfigError(
            f"deserializer is a {type(given).__name__}: give a schema of a SchemaRegistry, or a"
            " function of the payload"
        )
    return _Function(given)
