"""JSON as values of Python types: what a handler's body and its fields may be annotated with."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
import types
import typing
from collections.abc import (
    Callable,
    Collection,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
    Set,
)
from datetime import date, datetime, time
from decimal import Decimal
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

from kafkamq.errors import ConfigError

_PLAIN = (str, int, float, bool, dict, list, type(None), object)
_LISTS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    tuple: tuple,
    Sequence: list,
    MutableSequence: list,
    Collection: list,
    Set: set,
}
_DICTS = (dict, Mapping, MutableMapping)
# Python reads no longer numbers.
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,3999}")


def _zulu(text: str) -> str:
    """Return it with an offset in the place of Z, which Python 3.10 does not read."""
    return f"{text[:-1]}+00:00" if text.endswith("Z") else text


_FROM_TEXT: dict[Any, Callable[[str], Any]] = {
    datetime: lambda text: datetime.fromisoformat(_zulu(text)),
    date: date.fromisoformat,
    time: lambda text: time.fromisoformat(_zulu(text)),
    UUID: UUID,
    Decimal: Decimal,
}


class BodyError(ValueError):
    """A payload is not what the handler takes; says why, never what is in it."""


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def check_type(annotation: Any, where: str, known: frozenset[Any] = frozenset()) -> None:
    """Checks that ``convert`` can check values of a type; those of ``known`` it can."""
    plain = _unwrapped(annotation)
    if plain in known or plain is Any or _is_model(plain) or plain in _PLAIN:
        return
    origin = get_origin(plain) or plain
    if dataclasses.is_dataclass(plain):
        hints = _field_types(plain, where)
        for field in dataclasses.fields(plain):
            if field.init:
                # Fields without ``init`` are not given, nor are class variables.
                check_type(hints[field.name], f"{where}.{field.name}", known | {plain})
    elif is_union(plain) or origin in _LISTS or origin in _DICTS:
        kinds = get_args(plain)
        if origin in _DICTS and kinds:
            _check_key(kinds[0], where)
            kinds = kinds[1:]
        for kind in kinds:
            if kind is not Ellipsis:
                check_type(kind, where, known)
    elif origin is Literal:
        _check_literal(plain, where)
    elif not (origin in _FROM_TEXT or typing.is_typeddict(plain) or _is_enum(plain)):
        raise ConfigError(
            f"{where} is annotated {annotation!r}: a field is JSON (str, int, dict, list, ...), a "
            "dataclass, a pydantic model, an Enum, a Literal, datetime, date, time, Decimal, UUID, "
            "tuple, set, Sequence or Mapping"
        )


def _check_literal(annotation: Any, where: str) -> None:
    for each in get_args(annotation):
        if not isinstance(_in_json(each), str | int | float | None):
            raise ConfigError(f"{where} is annotated {annotation!r}: JSON has no {each!r}")


def _check_key(annotation: Any, where: str) -> None:
    kind = _unwrapped(annotation)
    if get_origin(kind) is Literal:
        is_text = all(isinstance(_in_json(each), str) for each in get_args(kind))
    elif _is_enum(kind):
        is_text = all(isinstance(each.value, str) for each in kind)
    else:
        is_text = kind in (str, int, Any, object) or kind in _FROM_TEXT
    if not is_text:
        raise ConfigError(
            f"{where} has keys annotated {annotation!r}: JSON's are texts, and can become str, "
            "int, an Enum or a Literal of texts, datetime, date, time, Decimal or UUID"
        )


def convert(value: Any, annotation: Any, where: str) -> Any:
    """JSON as a value of a type that ``check_type`` has passed."""
    plain = _unwrapped(annotation)
    origin = get_origin(plain) or plain
    if plain is Any or plain is object:
        return value
    if dataclasses.is_dataclass(plain):
        return _dataclass(value, plain, where)
    if _is_model(plain):
        return _model(value, plain, where)
    if is_union(plain):
        return _one_of(value, get_args(plain), where)
    if origin is Literal:
        return _literal(value, get_args(plain), where)
    if origin in _LISTS:
        return _several(value, origin, get_args(plain), where)
    if origin in _DICTS and isinstance(value, dict) and get_args(plain):
        return _object(value, get_args(plain), where)
    if origin in _FROM_TEXT or _is_enum(origin):
        return _scalar(value, origin, where)
    wanted = dict if typing.is_typeddict(plain) else origin
    if not _fits(value, wanted):
        raise BodyError(f"{where} is {_kind(value)}: it must be {_name(wanted)}")
    return value


def _unwrapped(annotation: Any) -> Any:
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            return annotation


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _in_json(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _literal(value: Any, allowed: tuple[Any, ...], where: str) -> Any:
    for each in allowed:
        known = _in_json(each)
        if type(value) is type(known) and value == known:
            return each
    raise BodyError(f"{where} is none of the values that it may be")


def _object(value: dict[str, Any], kinds: tuple[Any, ...], where: str) -> dict[Any, Any]:
    key, item = kinds
    found = {
        _key(name, key, where): convert(each, item, f"{where}.{name}")
        for name, each in value.items()
    }
    if len(found) != len(value):
        # Keys such as 1 and 1.0 are equal.
        raise BodyError(f"two keys of {where} are the same {_name(key)}")
    return found


def _key(name: str, annotation: Any, where: str) -> Any:
    kind = _unwrapped(annotation)
    if kind in (str, Any, object):
        return name
    if kind is int:
        if not _WHOLE.fullmatch(name):
            raise BodyError(f"a key of {where} is no int")
        return int(name)
    return convert(name, kind, f"a key of {where}")


def _is_model(annotation: Any) -> bool:
    return hasattr(annotation, "model_validate_json")


def _field_types(kind: Any, where: str) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(kind)
    except Exception as error:
        raise ConfigError(f"{where}: the fields of {kind!r} cannot be read: {error}") from error
    for name, hint in hints.items():
        is_init_var = hint is dataclasses.InitVar or isinstance(hint, dataclasses.InitVar)
        if is_init_var:
            # An ``InitVar`` is no field, and so nothing would be given.
            raise ConfigError(
                f"{where}.{name} is an InitVar, which no body is read for: make it a field, or "
                "annotate the argument Any and make the object with deserializer="
            )
    return hints


def _fits(value: Any, wanted: Any) -> bool:
    if wanted is type(None):
        return value is None
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _several(value: Any, kind: Any, items: tuple[Any, ...], where: str) -> Any:
    if not isinstance(value, list):
        raise BodyError(f"{where} is {_kind(value)}: it must be {_name(kind)}")
    if kind is tuple and items and items[-1] is not Ellipsis:
        if len(value) != len(items):
            raise BodyError(f"{where} has {len(value)} items: it must have {len(items)}")
        kinds = list(items)
    else:
        kinds = [items[0] if items else Any] * len(value)
    found = [
        convert(each, item, f"{where}[{at}]")
        for at, (each, item) in enumerate(zip(value, kinds, strict=True))
    ]
    try:
        return _LISTS[kind](found)
    except TypeError:
        raise BodyError(f"{where} cannot be a {_name(kind)}") from None


def _scalar(value: Any, kind: Any, where: str) -> Any:
    if type(value) is kind:
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        make = _FROM_TEXT.get(kind)
        if make is None:
            return kind(value)
        if isinstance(value, str) or (kind is Decimal and is_number):
            return make(str(value))
    except (ValueError, TypeError, ArithmeticError):
        raise BodyError(f"{where} is no {_name(kind)}") from None
    raise BodyError(f"{where} is {_kind(value)}: it must be {_name(kind)}")


def _model(value: Any, kind: Any, where: str) -> Any:
    try:
        try:
            text = json.dumps(value)
        except TypeError:
            return kind.model_validate(value)
        return kind.model_validate_json(text)
    except ValueError as error:
        raise BodyError(f"{where}: {without_input(error)}") from None


def without_input(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    if errors is None:
        return type(error).__name__
    found = errors(include_url=False, include_input=False, include_context=False)
    parts = [
        f"{'.'.join(str(part) for part in each['loc']) or 'the body'}: {each['msg']}"
        for each in found[:5]
    ]
    return "; ".join(parts)


def _one_of(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    failures = []
    for kind in kinds:
        try:
            return convert(value, kind, where)
        except BodyError as error:  # noqa: PERF203 - a handful
            failures.append(str(error))
    raise BodyError(failures[0])


@functools.lru_cache(maxsize=1024)
def _fields(kind: Any) -> list[tuple[str, Any, bool]]:
    """Name and type of the fields that a body gives, and whether it must."""
    # This takes many times what the rest of a conversion takes.
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return [
        (each.name, hints[each.name], each.default is missing and each.default_factory is missing)
        for each in dataclasses.fields(kind)
        if each.init
    ]


def _dataclass(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise BodyError(f"{where} is {_kind(value)}: it must be an object")
    given: dict[str, Any] = {}
    for name, hint, is_needed in _fields(kind):
        if name in value:
            given[name] = convert(value[name], hint, f"{where}.{name}")
        elif is_needed:
            raise BodyError(f"{where} has no {name}")
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise BodyError(f"{where} is refused: {type(error).__name__}: {error}") from None


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    other = "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    return names.get(type(value), other)
