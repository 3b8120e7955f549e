"""Gives loaded modules the simulator's names for threads, time and chance, and takes them back.

A name is found by what it stands for: ``threading``, ``from time import monotonic`` and
``from queue import SimpleQueue`` are all replaced in the module's namespace. Things that a process
has once, such as its registry of health, become one per simulated process.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import copy
import functools
import importlib
import os
import pkgutil
import queue
import random
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from harness.simulation.executors import Executors, Queues
from harness.simulation.modules import (
    AtExit,
    os_module,
    random_module,
    time_module,
)
from harness.simulation.primitives import Threading
from harness.simulation.scheduler import Scheduler, SimulationOver

SHELLS = (
    "kafkamq.config",
    "kafkamq.metrics",
    "kafkamq.transport",
    "kafkamq.queue",
    "kafkamq.markers",
    "kafkamq.claims",
    "kafkamq.parallel",
    "kafkamq.runtime.work_queue",
    "kafkamq.runtime.jobs",
    "kafkamq.runtime.steps",
    "kafkamq.runtime.thread_executor",
    "kafkamq.runtime.verdicts",
    "kafkamq.runtime.work_queue",
    "kafkamq.spark.source.planning",
    "kafkamq.spark.source.streaming",
    "kafkamq.spark.tracker.folding",
    "kafkamq.spark.tracker.settling",
)
"""What runs simulated: these modules and all below them."""

_EMPTIED = {
    "kafkamq.transport.log_reader": "_readers",
    "kafkamq.transport.transactions": "_abandoned",
}
"""What modules collect in the life of a process: empty inside of the block."""

_ATOMIC = ("kafkamq.transport.memory",)
"""Kafka in memory: what it does under a lock is one step for everybody."""

_HOMES = ("time", "random", "secrets", "threading", "concurrent.futures._base")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_REAL = (
    threading.Thread,
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.local,
    queue.Queue,
    queue.SimpleQueue,
    concurrent.futures.Future,
    concurrent.futures.Executor,
    *_LOCKS,
)
_MODULES = (threading, time, random, secrets, uuid, queue, concurrent.futures, os, atexit)


def load_shells() -> list[ModuleType]:
    """Import all of them: what is loaded later would have the real names."""
    loaded = []
    for name in SHELLS:
        module = importlib.import_module(name)
        below = pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}.")
        loaded += [module, *(importlib.import_module(found.name) for found in below)]
    return loaded


class _PerProcess:
    """Stands for an object that each process has one of."""

    def __init__(self, scheduler: Scheduler, make: Callable[[], object]) -> None:
        self._scheduler = scheduler
        self._make = make

    def __getattr__(self, name: str) -> object:
        task = self._scheduler.current
        if self._scheduler.is_over or task is None:
            raise SimulationOver
        own = task.process.globals
        if self not in own:
            own[self] = self._make()
        return getattr(own[self], name)


class _Names:
    """It holds by identity what stands for what."""

    def __init__(self, scheduler: Scheduler, *, is_atomic: bool) -> None:
        chance = random.Random(scheduler.rng.random())
        threads = Threading(scheduler, is_atomic=is_atomic)
        self._threading = threads
        executors = Executors(threads)
        clock = time_module(scheduler)
        self._scheduler = scheduler
        self._by_id: dict[int, object] = {
            id(threading): threads,
            id(time): clock,
            id(queue): Queues(threads),
            id(concurrent.futures): executors,
            id(os): os_module(scheduler, chance),
            id(atexit): AtExit(scheduler),
        }
        seeded = random_module(chance)
        self._new_random: Callable[[], object] = seeded[random].replaced["Random"]
        self._by_id.update({id(module): double for module, double in seeded.items()})
        for module, double in ((time, clock), *seeded.items()):
            self._add(module, double.replaced)
        for module in (threading, queue, concurrent.futures):
            names = self._by_id[id(module)]
            self._add(module, {name: getattr(names, name) for name in dir(names)})

    def add(self, others: Sequence[tuple[object, object]]) -> None:
        """What stands for what, besides."""
        self._by_id.update({id(real): double for real, double in others})

    def _add(self, module: ModuleType, doubles: Mapping[str, object]) -> None:
        for name, double in doubles.items():
            real = getattr(module, name, None)
            if not name.startswith("_") and (callable(real) or isinstance(real, type)):
                self._by_id[id(real)] = double

    def of(self, value: object, singles: dict[int, object]) -> object:
        """Return what to put in its place; itself: it stays."""
        found = self._by_id.get(id(value), value)
        if found is not value:
            return found
        if isinstance(value, functools.partial):
            inner = self._by_id.get(id(value.func))
            return functools.partial(inner, *value.args) if callable(inner) else value
        if isinstance(value, _LOCKS[0]):
            return self._threading.Lock()
        if type(value) is random.Random:
            return self._new_random()
        if _holds_real(value):
            if id(value) not in singles:
                make = functools.partial(self._fresh, value)
                singles[id(value)] = _PerProcess(self._scheduler, make)
            return singles[id(value)]
        return value

    def _fresh(self, value: object) -> object:
        """Return one as the module made it."""
        try:
            return type(value)()
        except TypeError:  # it needs arguments: the same ones, and nothing that has happened
            new = copy.copy(value)
            for name, each in vars(value).items():
                if isinstance(each, _LOCKS):
                    setattr(new, name, self._threading.RLock())
                elif isinstance(each, (dict, list, set)):
                    setattr(new, name, type(each)())
            return new


def _holds_real(value: object) -> bool:
    """Return whether an object of ours has a lock or the like."""
    kind = type(value)
    if not kind.__module__.startswith("kafkamq.") or isinstance(value, (type, FunctionType)):
        return False
    return any(isinstance(each, _REAL) for each in getattr(value, "__dict__", {}).values())


@contextlib.contextmanager
def swapped(scheduler: Scheduler, others: Sequence[tuple[object, object]] = ()) -> Iterator[None]:
    """Inside of the block, the shells' names are the scheduler's; ``others``: what else is."""
    modules = load_shells()
    names = _Names(scheduler, is_atomic=False), _Names(scheduler, is_atomic=True)
    for each in names:
        each.add(others)
    singles: dict[int, object] = {}
    before: list[tuple[ModuleType, str, object]] = []
    for module in modules:
        own = names[module.__name__.startswith(_ATOMIC)]
        for name, value in list(vars(module).items()):
            if name.startswith("__"):
                continue
            is_collection = _EMPTIED.get(module.__name__) == name
            double = type(value)() if is_collection else own.of(value, singles)
            if double is not value:
                before.append((module, name, value))
                setattr(module, name, double)
    try:
        yield
    finally:
        for module, name, value in reversed(before):
            setattr(module, name, value)


def leftovers(modules: Sequence[ModuleType]) -> list[str]:
    """Return where something real is left that a simulated thread could come upon."""
    found = []
    for module in modules:
        for name, value in vars(module).items():
            if name.startswith("__"):
                continue
            place = f"{module.__name__}.{name}"
            if _is_real(value) or _holds_real(value):
                found.append(place)
            elif getattr(value, "__module__", "") == module.__name__:
                found += [f"{place}.{each}" for each in _inside(value)]
    return found


def _is_real(value: object) -> bool:
    if isinstance(value, ModuleType):
        return value in _MODULES
    if isinstance(value, type):
        return issubclass(value, _REAL)
    if isinstance(value, functools.partial):
        return _is_real(value.func)
    if isinstance(value, _REAL) or type(value) is random.Random:
        return True
    is_function = isinstance(value, (BuiltinFunctionType, FunctionType, MethodType))
    return is_function and _home(value) in _HOMES


def _home(function: object) -> str:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, random.Random):
        return "random"
    return str(getattr(function, "__module__", ""))


def _inside(value: object) -> Iterator[str]:
    """Class attributes, defaults of dataclasses and of functions."""
    if isinstance(value, FunctionType):
        yield from (f"({name})" for name in _defaults(value))
        return
    if not isinstance(value, type):
        return
    for name, each in vars(value).items():
        if name == "__dataclass_fields__":
            for field in each.values():
                if _is_real(field.default) or _is_real(field.default_factory):
                    yield field.name
        elif isinstance(each, FunctionType):
            yield from (f"{name}({default})" for default in _defaults(each))
        elif _is_real(each):
            yield name


def _defaults(function: FunctionType) -> Iterator[str]:
    every = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for each in every:
        if _is_real(each):
            yield repr(each)
