"""Tests side by side in processes that share one collection: ``--forks 6``.

Importing and collecting all tests keeps a core busy for seconds. It is done once, and each process
is a fork of the one that has done it. `tests.scheduling` says which tests a process takes.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest
from tests.scheduling import FORK, Units

# Of a fork that lets all others go first.
_NICE = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("kafkamq").addoption(
        "--forks", type=int, default=0, metavar="COUNT", help="processes to run the tests in"
    )


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if not option.forks or option.collectonly or session.testsfailed or not session.items:
        return None
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # all forks' own
    units = Units([item.nodeid for item in session.items])
    forks: dict[int, _Fork] = {}
    try:
        for number in range(min(option.forks, units.left)):
            forks[number] = _Fork(number, session, units, forks.values())
        while forks:
            ready = wait([fork.link for fork in forks.values()])
            for number, fork in list(forks.items()):
                if fork.link in ready and not fork.hear(session, units):
                    del forks[number]
                    fork.end()
                    if units.left and fork.at is not None:
                        forks[number] = _Fork(number, session, units, forks.values())
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for fork in forks.values():
            fork.end()
    if units.left:
        raise session.Interrupted(f"no process is left for {units.left} files or tests")
    return True


class _Fork:
    """A process that runs tests, and our end of the link to it."""

    def __init__(
        self, number: int, session: pytest.Session, units: Units, others: Iterable[_Fork]
    ) -> None:
        self._number = number
        is_last_to_go = units.has_rules_for(number)
        self.at: int | None = None
        self._ahead: list[int] = []
        self.link, theirs = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            # A link ends when nobody has our end of it any more.
            for fork in (*others, self):
                fork.link.close()
            _run(number, session, theirs, is_last_to_go=is_last_to_go)
        theirs.close()

    def hear(self, session: pytest.Session, units: Units) -> bool:
        """Do what one message of the process asks for; return whether more may come."""
        hook = session.config.hook
        try:
            kind, what = self.link.recv()
            if kind == "more":
                indices = units.take(self._number)
                self._ahead += indices
                self.link.send(indices)
        except (EOFError, ConnectionError):
            units.give_back(self._ahead)
            if self.at is not None:
                hook.pytest_runtest_logreport(report=self._death(session.items[self.at]))
            return False
        if kind == "at":
            self.at = what
            self._ahead = [index for index in self._ahead if index != what]
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=what)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=what)
            hook.pytest_runtest_logreport(report=report)
        return True

    def end(self) -> None:
        """Return when it has ended: at its next word, if it is at a test."""
        self.link.close()
        os.waitpid(self._pid, 0)

    def _death(self, item: pytest.Item) -> pytest.TestReport:
        said = f"process {self._pid} ended at {item.nodeid}"
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")


def _run(
    number: int, session: pytest.Session, link: Connection, *, is_last_to_go: bool
) -> NoReturn:
    """The life of a fork: its tests, one after the other, until there are no more."""
    config, code = session.config, 1
    try:
        os.environ[FORK] = str(number)
        if is_last_to_go:
            os.nice(_NICE)
        # What is captured goes through files, which a fork shares with its parent.
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_Sender(number, config, link))
        indices = _indices(link)
        index = next(indices, None)
        while index is not None:
            following = next(indices, None)
            link.send(("at", index))
            config.hook.pytest_runtest_protocol(
                item=session.items[index],
                nextitem=None if following is None else session.items[following],
            )
            index = following
        link.send(("at", None))
        code = 0
    except (EOFError, BrokenPipeError):
        pass  # The parent has heard enough.
    except BaseException:  # noqa: BLE001 - the parent sees that it ended
        traceback.print_exc()
    finally:
        # What the parent has registered for its own end is not a fork's.
        os._exit(code)


def _indices(link: Connection) -> Iterator[int]:
    while True:
        link.send(("more", None))
        indices: list[int] = link.recv()
        if not indices:
            return
        yield from indices


class _Sender:
    """Of a fork: has its parent report what would be reported here."""

    def __init__(self, number: int, config: pytest.Config, link: Connection) -> None:
        self._number, self._config, self._link = number, config, link

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", {**data, "fork": self._number}))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        # The warning itself may hold what cannot be sent.
        text = warnings.WarningMessage(
            str(warning_message.message),
            warning_message.category,
            warning_message.filename,
            warning_message.lineno,
        )
        what = {"warning_message": text, "when": when, "nodeid": nodeid, "location": location}
        self._link.send(("warning", what))
