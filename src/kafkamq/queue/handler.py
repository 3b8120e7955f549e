"""Handlers: their options, checked once when they are registered, and what they are called with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FunctionType, MethodType
from typing import Any, Protocol, TypedDict, get_args, get_origin

from kafkamq.config import Backoff, Option, Options, QueueConfig, converted
from kafkamq.errors import ConfigError, SchemaRegistryError
from kafkamq.queue.json_values import BodyError, check_type, convert, is_union, without_input
from kafkamq.queue.message import Message
from kafkamq.queue.rules.capabilities import (
    Feature,
    backend_of,
    default_order,
    order_feature,
    require,
)
from kafkamq.queue.rules.retry import RetryOn, retry_kinds
from kafkamq.queue.schemas.registry import (
    BodyUnavailableError,
    Deserializer,
    Headers,
    deserializer_of,
)
from kafkamq.types import Backend

CALL_OPTIONS: tuple[Option[Any], ...] = (
    Options.concurrency, Options.processes, Options.threads, Options.timeout, Options.batch_size,
    Options.batch_linger, Options.max_rate,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    """How a handler is called and tried again, for messages of a queue or records of topics."""

    concurrency: int = Options.concurrency.default  # at once; or how many to begin with
    processes: int = Options.processes.default  # 0: threads, or one event loop
    threads: int = Options.threads.default  # or coroutines, in each process
    timeout_ms: int = Options.timeout.default_ms  # 0: none
    batch_size: int = Options.batch_size.default  # the most of a call; 0: no lists
    batch_linger_ms: int = Options.batch_linger.default_ms
    max_attempts: int | None = None  # None: the queue's max_deliveries; of records no limit
    retry_on: RetryOn | None = None  # None: any
    max_rate: float | None = None  # a second
    deserializer: Deserializer | None = None  # None: the body is read as it is annotated

    def check_call(self, asked: str = "") -> None:
        """Refuse what does not fit together; ``asked`` stands before it."""
        if self.threads > 1 and not self.processes:
            raise ConfigError(f"{asked}threads is for processes=; else concurrency says how many")
        if self.batch_linger_ms and not self.batch_size:
            raise ConfigError(f"{asked}batch_linger needs a batch_size")


@dataclass(frozen=True, kw_only=True)
class HandlerSpec(CallSettings):
    queue: QueueConfig
    function: Callable[..., Any]
    binder: Binder = field(repr=False)
    ordering: str = "unordered"
    retry: Backoff | None = None  # None: the queue's

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", self.function))

    @property
    def is_async(self) -> bool:
        return is_async_function(self.function)


class CallOptions(TypedDict, total=False):
    """All of them may be left out; times are s, or timedeltas."""

    processes: int
    """Run the handler in so many processes; it must be importable there."""
    threads: int
    """Handlers at once in each process: threads for ``def``, coroutines for ``async def``; 1."""
    timeout: float | timedelta | None
    """s after which a call has failed: a coroutine is cancelled, a process with one handler ended,
    a thread left alone; None (the default): never."""
    batch_size: int
    """Give the handler lists of up to so many; 0 (the default): single ones."""
    batch_linger: float | timedelta
    """How long a list that is not full waits for more; 0."""
    max_attempts: int | None
    """Then a message or record that failed is given up. None (the default): of a queue, its
    ``max_deliveries`` counts, which is never exceeded; a record is tried forever. A handler that
    ended well, and whose result could not be written for want of brokers or rights, has not
    failed."""
    retry_on: type[BaseException] | Sequence[type[BaseException]] | RetryOn | None
    """Exceptions that are worth another attempt; any other one rejects. A mapping gives kinds a
    back-off of their own, or None. None (the default): all are. Time that has run out, and a
    process that has died, always are."""
    max_rate: float | None
    """So many a second are begun, at most; of a queue, in each process of a worker."""
    deserializer: Deserializer | Callable[[bytes], Any] | None
    """Makes the handler's body: a schema of a ``SchemaRegistry``, or a function of the payload, of
    which any exception rejects it. What waits for the registry uses up no attempt."""


class HandlerOptions(CallOptions, total=False):
    """All of them may be left out, those of ``CallOptions`` as well."""

    concurrency: int | None
    """Handlers at once; 16."""
    ordering: str | None
    """What stays in order; None: what the backend has (``kafkamq backends``)."""
    backend: str | None
    """The backend that the handler counts on; must be the queue's."""
    retry: Backoff | None
    """The delay after a failure; None: the queue's back-off."""


def make_spec(
    queue: QueueConfig, function: Callable[..., Any], options: HandlerOptions
) -> HandlerSpec:
    for name in options:
        if name not in HandlerOptions.__annotations__:
            raise TypeError(f"there is no option {name!r}")
    if not callable(function):
        raise ConfigError(f"the handler is a {type(function).__name__}: give a function")
    refuse_generator(function)
    asked = f"handler of queue {queue.queue_id!r}"
    backend = options.get("backend")
    if backend is not None and backend_of(backend) is not queue.backend:
        raise ConfigError(
            f"{asked}: backend={backend!r}, and the queue was made with "
            f"{queue.backend.value!r}: give it to Service.queue()"
        )
    order = options.get("ordering") or default_order(queue.backend)
    require(queue.backend, order_feature(order), f"{asked}: ordering={order!r}")
    retry, retry_on = options.get("retry"), retry_kinds(options.get("retry_on"))
    if not isinstance(retry, Backoff | None):
        raise ConfigError(f"{asked}: retry is {retry!r}: it must be a Backoff")
    for name, backoffs in (("retry", [retry]), ("retry_on", (retry_on or {}).values())):
        if any(backoffs):
            require(queue.backend, Feature.RETRY_DELAY, f"{asked}: {name}")
    named = {name: each for name, each in options.items() if (name, each) != ("concurrency", None)}
    given = converted(CALL_OPTIONS, named, of=f"{asked}: ")
    if given.get("processes"):
        given["concurrency"] = given["processes"] * given.get("threads", Options.threads.default)
    attempts, most = options.get("max_attempts"), queue.max_deliveries
    if attempts is not None and (type(attempts) is not int or not 1 <= attempts <= most):
        raise ConfigError(
            f"{asked}: max_attempts is {attempts!r}: it must be 1 to the queue's max_deliveries, "
            f"{most}"
        )
    of_lists = bool(given.get("batch_size"))
    deserializer = deserializer_of(options.get("deserializer"))
    spec = HandlerSpec(
        queue=queue,
        function=function,
        binder=Binder(function, of_lists=of_lists, deserializer=deserializer),
        ordering=order,
        retry=retry,
        max_attempts=attempts,
        retry_on=retry_on,
        deserializer=deserializer,
        **given,
    )
    spec.check_call(f"{asked}: ")
    _check_lease(spec, asked)
    return spec


def _check_lease(spec: HandlerSpec, asked: str) -> None:
    """Where nothing renews a lease a handler must end within it."""
    # A broker's lock lasts 15 s at least.
    longest_ms = max(spec.queue.redelivery_timeout_ms, 15_000)
    if spec.queue.backend is Backend.SHARE and spec.timeout_ms >= longest_ms:
        require(
            spec.queue.backend,
            Feature.LONG_HANDLERS,
            f"{asked}: timeout={spec.timeout_ms / 1000:g} s, a lock of {longest_ms / 1000:g} s",
        )


# Layers of decorators that are looked through: they may go round in a circle.
_MAX_LAYERS = 100
_JSON_TYPES = (dict, list, int, float, bool, Mapping, Sequence)


class MessageLike(Protocol):
    @property
    def payload(self) -> bytes | None: ...

    @property
    def raw_headers(self) -> Headers: ...


class Binder:
    """Makes the arguments of one handler.

    A parameter annotated ``Message``, or not at all, gets the message; the other one, at most one,
    gets the body: ``bytes``, ``str``, ``dict`` and other JSON, a dataclass, or a pydantic model.
    What has a default keeps it, unless it is the first parameter. With a deserializer, that makes
    the body, which must be what is annotated; a dataclass or a model is made of a ``dict``.

    Raises:
        ConfigError: The handler takes something else.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        of_lists: bool = False,
        deserializer: Deserializer | None = None,
    ) -> None:
        """``of_lists``: the handler gets lists of messages, bodies, or both."""
        self._parse: list[Callable[[Any], Any]] = []
        self._deserializer = deserializer
        name = getattr(function, "__qualname__", repr(function))
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"handler {name} has no signature: {error}") from None
        hints = _hints(function)
        bodies, is_over = 0, False
        for parameter in signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            annotation = hints.get(parameter.name)
            if of_lists:
                annotation = _element(annotation, f"handler {name}: {parameter.name}")
            has_default = parameter.default is not parameter.empty
            is_option = parameter.kind is parameter.KEYWORD_ONLY
            wants_message = _is_message(annotation)
            if has_default and not is_option and (is_over or (self._parse and not wants_message)):
                if wants_message or (not bodies and _is_plainly_a_body(annotation)):
                    raise ConfigError(
                        f"handler {name}: {parameter.name} has a default, and would keep it: give "
                        "it none, or make it the first parameter"
                    )
                is_over = True
                continue
            if is_option or (has_default and annotation is None):
                if not has_default:
                    raise ConfigError(f"handler {name}: nothing can be given to {parameter.name}")
                is_over = True
                continue
            if annotation is None or wants_message:
                self._parse.append(getattr(annotation, "of_sync", _itself))
                continue
            bodies += 1
            where = f"handler {name}: {parameter.name}"
            self._parse.append(_parser(annotation, where, deserializer))
        self._check(name, bodies)

    def _check(self, name: str, bodies: int) -> None:
        if not self._parse or bodies > 1:
            raise ConfigError(f"handler {name} must take a body, a Message, or both")
        if self._deserializer is not None and not bodies:
            raise ConfigError(
                f"handler {name} takes no body, and has a deserializer: annotate the parameter "
                "that gets what it makes (dict, Any, a dataclass, ...)"
            )

    def arguments(self, message: MessageLike) -> list[Any]:
        """Return the arguments of one message.

        Raises:
            BodyError: Its payload is not what the handler takes.
            BodyUnavailableError: Nobody can say now whether it is.
        """
        return [parse(message) for parse in self._parse]

    def is_ready(self, message: MessageLike) -> bool:
        """Return whether ``arguments`` asks nobody, and so never waits."""
        if self._deserializer is None:
            return True
        payload = message.payload
        return payload is None or self._deserializer.is_ready(payload, message.raw_headers)


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


def is_async_function(function: Callable[..., Any]) -> bool:
    """Return whether a call of it has to be awaited: a function, a partial of one, or an object."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def refuse_generator(function: Callable[..., Any], *, may_yield: bool = False) -> None:
    """Refuse a function whose call does not run it, as it has ``yield``.

    ``may_yield``: Somebody iterates over what it returns, so only ``async def`` may not yield.
    """
    for layer in _layers(function):
        if inspect.isasyncgenfunction(layer) or (
            inspect.isgeneratorfunction(layer) and not may_yield
        ):
            name = getattr(function, "__qualname__", repr(function))
            raise ConfigError(
                f"handler {name} yields, and so a call would not run it: let it do its work, and "
                "return what comes of it (several things as a list), without yield"
            )


def _layers(function: Any) -> Iterator[Any]:
    """Yield what stands in front of a handler's body, and that: partials, decorators and objects.

    Decorators of ``contextlib`` and ``functools.lru_cache`` run nothing of what the function
    returns. Others may: what they return is looked at when they are called (``unfinished``).
    """
    for _ in range(_MAX_LAYERS):
        # A class's call makes an object, no more.
        is_class = isinstance(function, type)
        call = None if is_class else getattr(function, "__call__", None)  # noqa: B004
        yield from (function, call)
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, functools._lru_cache_wrapper) or (
            getattr(function, "__globals__", None) is vars(contextlib)
        ):
            function = getattr(function, "__wrapped__", None)
        elif isinstance(call, FunctionType | MethodType):
            function = call
        else:
            return


def _is_message(annotation: Any) -> bool:
    if is_union(annotation):
        return any(_is_message(kind) for kind in get_args(annotation))
    if not isinstance(annotation, type):
        return False
    return issubclass(annotation, Message) or getattr(annotation, "is_kafkamq_message", False)


def _is_plainly_a_body(annotation: Any) -> bool:
    kinds = get_args(annotation) if is_union(annotation) else (annotation,)
    return any(
        dataclasses.is_dataclass(kind) or hasattr(kind, "model_validate_json") for kind in kinds
    )


def _element(annotation: Any, where: str) -> Any:
    """Return what a list of a batch handler has in it; None: messages."""
    if annotation is None or annotation in (list, Sequence):
        return None
    if get_origin(annotation) not in (list, Sequence):
        raise ConfigError(f"{where} is annotated {annotation!r}: with batch_size it is a list")
    (kind,) = get_args(annotation)
    return kind


def wants_body(function: Callable[..., Any], *, of_lists: bool = False) -> bool:
    """Say whether a handler of records is annotated so that it plainly wants a record's value."""
    try:
        hints = _hints(function)
        parameters = inspect.signature(function).parameters.values()
        kinds = [hints.get(each.name) for each in parameters if each.default is each.empty]
        if of_lists:
            kinds = [_element(kind, "") for kind in kinds]
    except (ConfigError, TypeError, ValueError):
        # It takes a record, whatever it says.
        return False
    return any(map(_is_body, kinds))


def _is_body(annotation: Any) -> bool:
    if is_union(annotation):
        return any(map(_is_body, get_args(annotation)))
    if _is_message(annotation):
        return False
    origin = get_origin(annotation) or annotation
    is_json = origin in _JSON_TYPES or typing.is_typeddict(annotation)
    return annotation in (bytes, str) or is_json or _is_plainly_a_body(annotation)


def _is_json(annotation: Any) -> bool:
    is_plain = (get_origin(annotation) or annotation) in _JSON_TYPES or is_union(annotation)
    return is_plain or dataclasses.is_dataclass(annotation) or typing.is_typeddict(annotation)


def _itself(message: Any) -> Any:
    return message


def _parser(
    annotation: Any, where: str, deserializer: Deserializer | None = None
) -> Callable[[MessageLike], Any]:
    if deserializer is not None:
        return _deserialized(deserializer, annotation, where)
    kinds = get_args(annotation) if is_union(annotation) else ()
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
    if validate is not None:
        return _validated(validate)
    if _is_json(annotation):
        check_type(annotation, where)
        return lambda message: convert(_json(message), annotation, "the body")
    raise ConfigError(
        f"{where} is annotated {annotation!r}: a body is bytes, str, JSON (dict, list, ...), a "
        "dataclass or a pydantic model"
    )


def _deserialized(
    deserializer: Deserializer, annotation: Any, where: str
) -> Callable[[MessageLike], Any]:
    kinds = get_args(annotation) if is_union(annotation) else ()
    takes_null = type(None) in kinds or annotation is Any
    rest = [kind for kind in kinds if kind is not type(None)]
    wanted = rest[0] if len(rest) == 1 else annotation
    if _is_json(wanted):
        check_type(wanted, where, frozenset({bytes}))

    def parse(message: MessageLike) -> Any:
        if message.payload is None and takes_null:
            return None
        try:
            body = deserializer.deserialize(_payload(message), message.raw_headers)
        except SchemaRegistryError as error:
            raise BodyUnavailableError(str(error), delay_s=error.delay_s) from error
        return convert(body, wanted, "the body")

    return parse


def _or_none(parse: Callable[[MessageLike], Any]) -> Callable[[MessageLike], Any]:
    """None for a null payload and, where the body is JSON, for its null."""
    is_text = parse is _text

    def parsed(message: MessageLike) -> Any:
        payload = message.payload
        if payload is None or (not is_text and payload.strip() == b"null"):
            return None
        return parse(message)

    return parsed


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
    except ValueError:
        # Python reads no number of thousands of digits.
        raise BodyError("the payload has a number that is too long") from None


def _validated(validate: Callable[[bytes], Any]) -> Callable[[MessageLike], Any]:
    def parse(message: MessageLike) -> Any:
        try:
            return validate(_payload(message))
        except BodyError:
            raise
        except ValueError as error:
            # pydantic's ValidationError is a ValueError.
            raise BodyError(without_input(error)) from None

    return parse
