"""A handler's arguments, made of a message by the annotations of its parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable
from typing import Any, Protocol, Union, get_args, get_origin

from kafkamq.errors import ConfigError
from kafkamq.kafka.message import Message

__all__ = ["Binder", "BodyError", "MessageLike"]

_JSON_TYPES = (dict, list, int, float, bool)


class BodyError(ValueError):
    """A payload is not what the handler takes; says why, never what is in it."""


class MessageLike(Protocol):
    """What a binder needs of a message."""

    @property
    def payload(self) -> bytes | None: ...


class Binder:
    """Makes the arguments of one handler.

    A parameter annotated ``Message``, or not at all, gets the message; the other one, at most one,
    gets the body: ``bytes``, ``str``, ``dict`` and other JSON, a dataclass, or a pydantic model.

    Raises:
        ConfigError: The handler takes something else.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._parse: list[Callable[[Any], Any]] = []
        name = getattr(function, "__qualname__", repr(function))
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"handler {name} has no signature: {error}") from None
        hints = _hints(function)
        bodies = 0
        for parameter in signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if parameter.kind is parameter.KEYWORD_ONLY or (
                parameter.default is not parameter.empty and parameter.name not in hints
            ):
                if parameter.default is parameter.empty:
                    raise ConfigError(f"handler {name}: nothing can be given to {parameter.name}")
                continue
            annotation = hints.get(parameter.name)
            if annotation is None or (isinstance(annotation, type) and _is_message(annotation)):
                self._parse.append(_itself)
                continue
            bodies += 1
            self._parse.append(_parser(annotation, f"handler {name}: {parameter.name}"))
        if not self._parse or bodies > 1:
            raise ConfigError(f"handler {name} must take a body, a Message, or both")

    def arguments(self, message: MessageLike) -> list[Any]:
        """The arguments for a message.

        Raises:
            BodyError: The payload is not what the handler takes.
        """
        return [parse(message) for parse in self._parse]


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    is_plain = inspect.isroutine(function)
    call = function if is_plain else getattr(function, "__call__", function)  # noqa: B004
    try:
        return typing.get_type_hints(call)
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(f"the annotations of handler {name} cannot be read: {error}") from error


def _is_message(annotation: type) -> bool:
    return issubclass(annotation, Message) or getattr(annotation, "is_kafkamq_message", False)


def _itself(message: Any) -> Any:
    return message


def _parser(annotation: Any, where: str) -> Callable[[MessageLike], Any]:
    """From a message to a value of that type."""
    kinds = get_args(annotation) if _is_union(annotation) else ()
    if type(None) in kinds and annotation not in (Any, bytes | None):
        rest = [kind for kind in kinds if kind is not type(None)]
        if len(rest) == 1:
            return _or_none(_parser(rest[0], where))
    if annotation in (bytes, Any, bytes | None):
        if annotation is bytes:
            return _payload
        return lambda message: message.payload
    if annotation is str:
        return _text
    validate = getattr(annotation, "model_validate_json", None)
    if validate is not None:  # a pydantic model
        return _validated(validate)
    origin = get_origin(annotation) or annotation
    is_json = origin in _JSON_TYPES or _is_union(annotation)
    if dataclasses.is_dataclass(annotation) or is_json or typing.is_typeddict(annotation):
        if dataclasses.is_dataclass(annotation):
            _field_types(annotation, where)
        return lambda message: _convert(_json(message), annotation, "the body")
    raise ConfigError(
        f"{where} is annotated {annotation!r}: a body is bytes, str, JSON (dict, list, ...), a "
        "dataclass or a pydantic model"
    )


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _or_none(parse: Callable[[MessageLike], Any]) -> Callable[[MessageLike], Any]:
    """None for a null payload and, where the body is JSON, for its null."""
    is_text = parse is _text

    def parsed(message: MessageLike) -> Any:
        payload = message.payload
        if payload is None or (not is_text and payload.strip() == b"null"):
            return None
        return parse(message)

    return parsed


def _field_types(kind: Any, where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except Exception as error:
        raise ConfigError(f"{where}: the fields of {kind!r} cannot be read: {error}") from error


def _payload(message: MessageLike) -> bytes:
    payload = message.payload
    if payload is None:
        raise BodyError("the payload is null")
    return payload


def _text(message: MessageLike) -> str:
    try:
        return _payload(message).decode()
    except UnicodeDecodeError as error:
        raise BodyError(f"the payload is no UTF-8 at byte {error.start}") from None


def _json(message: MessageLike) -> Any:
    try:
        return json.loads(_payload(message))
    except UnicodeDecodeError as error:
        raise BodyError(f"the payload is no UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise BodyError(f"the payload is no JSON: {error.msg} at {error.pos}") from None
    except RecursionError:
        raise BodyError("the payload is nested too deeply") from None
    except ValueError:  # Python reads no number of thousands of digits
        raise BodyError("the payload has a number that is too long") from None


def _validated(validate: Callable[[bytes], Any]) -> Callable[[MessageLike], Any]:
    def parse(message: MessageLike) -> Any:
        try:
            return validate(_payload(message))
        except BodyError:
            raise
        except ValueError as error:  # pydantic's ValidationError is one
            raise BodyError(_without_input(error)) from None

    return parse


def _without_input(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    if errors is None:
        return type(error).__name__
    found = errors(include_url=False, include_input=False, include_context=False)
    said = [
        f"{'.'.join(str(part) for part in each['loc']) or 'the body'}: {each['msg']}"
        for each in found[:5]
    ]
    return "; ".join(said)


def _convert(value: Any, annotation: Any, where: str) -> Any:
    """JSON as a value of a type; what is not known of the type is taken as it is."""
    origin = get_origin(annotation)
    if annotation is Any or annotation is dataclasses.MISSING:
        return value
    if dataclasses.is_dataclass(annotation):
        return _dataclass(value, annotation, where)
    validate = getattr(annotation, "model_validate_json", None)
    if validate is not None:  # a pydantic model inside of something else
        return _model(value, validate, where)
    if _is_union(annotation):
        return _one_of(value, get_args(annotation), where)
    if origin is list and isinstance(value, list) and get_args(annotation):
        (item,) = get_args(annotation)
        return [_convert(each, item, f"{where}[{at}]") for at, each in enumerate(value)]
    if origin is dict and isinstance(value, dict) and get_args(annotation):
        _, item = get_args(annotation)
        return {name: _convert(each, item, f"{where}.{name}") for name, each in value.items()}
    wanted = dict if typing.is_typeddict(annotation) else origin or annotation
    if not _fits(value, wanted):
        name = getattr(wanted, "__name__", str(wanted))
        raise BodyError(f"{where} is {_kind(value)}: it must be {name}")
    return value


def _fits(value: Any, wanted: Any) -> bool:
    if wanted is type(None):
        return value is None
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return wanted not in (str, bool, dict, list) or isinstance(value, wanted)


def _model(value: Any, validate: Callable[[str], Any], where: str) -> Any:
    try:
        return validate(json.dumps(value))
    except ValueError as error:
        raise BodyError(f"{where}: {_without_input(error)}") from None


def _one_of(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    failures = []
    for kind in kinds:
        try:
            return _convert(value, kind, where)
        except BodyError as error:  # noqa: PERF203 - a handful
            failures.append(str(error))
    raise BodyError(failures[0])


def _dataclass(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise BodyError(f"{where} is {_kind(value)}: it must be an object")
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        if field.name in value:
            given[field.name] = _convert(
                value[field.name], hints[field.name], f"{where}.{field.name}"
            )
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise BodyError(f"{where} has no {field.name}")
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise BodyError(f"{where} is refused: {type(error).__name__}: {error}") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
