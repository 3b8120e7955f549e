"""Fixtures that all tests share; kafkamq's pytest plugin and `harness.fixtures` have the others."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import threading
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings
from tests.examples import IS_FRESH
from tests.faults.figures import MARK
from tests.scheduling import lets_others_go_first
from tests.sharing import shared
from tests.spark_starts import spark_environment
from tests.waiting import SLOWNESS, measure_slowness, within

from kafkamq.dev import LocalKafka
from kafkamq.runtime.signals import STOPS, stop_on_signals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["harness.fixtures", "tests.leftovers"]

# However many workers a run has.
BROKERS = 2

# Started in the background by a shell, the tests would ignore Ctrl-C, and so would every process
# that they start and interrupt: an ignored signal is inherited, a handled one is not.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile(
    "kafkamq",
    deadline=None,
    derandomize=not IS_FRESH,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kafkamq")


# What is imported and collected stays: looking for garbage there takes a third of the time.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Measure how busy the machine is, once: workers and all other processes inherit it."""
    if SLOWNESS not in os.environ:
        workers = len(getattr(config.option, "tx", None) or ())
        os.environ[SLOWNESS] = f"{measure_slowness(workers):.1f}"
    if "SPARK_HOME" not in os.environ:
        home = TemporaryDirectory(prefix="kafkamq-tests-spark-")
        config.add_cleanup(home.cleanup)
        os.environ.update(spark_environment(Path(home.name)))


def pytest_report_header() -> str:
    return f"deadlines: {within(1):g} times those of a quiet machine"


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> object:
    """Give a test what it needs on this machine, whether a mark or pyproject.toml says it."""
    settings = pytest_timeout.Settings(within(settings.timeout), *settings[1:])
    return pytest_timeout.pytest_timeout_set_timer(item, settings)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Ours for ``--dist loadfile``."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.scheduling import ByKind

    return ByKind(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    number = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    if lets_others_go_first(int(number), (item.nodeid for item in session.items)):
        os.nice(5)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what is slow, so that no worker is alone with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Put back the signals that a command has taken here: it keeps them until its process ends."""
    before = {number: signal.getsignal(number) for number in STOPS}
    done = yield
    for number, handler in before.items():
        if getattr(signal.getsignal(number), "__module__", "") == stop_on_signals.__module__:
            signal.signal(number, handler)
    return done


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Undo what PySpark does to pytest's handlers, which would show each test's log as JSON.

    Behind an error, its loggers keep their records from the root. Pytest adds its handlers to all
    loggers that do so, and those of PySpark give each handler a format of their own.
    """
    for kind in ("SQL", "DataFrame"):
        logger = logging.root.manager.loggerDict.get(f"{kind}QueryContextLogger")
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    plugin: Any = item.config.pluginmanager.get_plugin("logging-plugin")
    for handler in (plugin.caplog_handler, plugin.report_handler):
        handler.setFormatter(plugin.formatter)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Note on the threads that are left who left them, for the simulator to name."""
    for thread in threading.enumerate():
        vars(thread).setdefault("left_by", nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Leave the exit status in pytest's cache, where ``.ci/run`` reads it: make hides it."""
    if not hasattr(session.config, "workerinput") and getattr(session.config, "cache", None):
        session.config.cache.set("kafkamq/exit_status", int(exitstatus))


_last: dict[str, tuple[float, str]] = {}  # of each worker: when it ended a test, and which


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    worker = getattr(report, "worker_id", None)
    # Behind its last one a worker may wait for those that use its broker.
    if worker is not None and report.when == "call":
        _last[worker] = report.stop, report.nodeid


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say who kept the others waiting at the end; repeat the figures of fault tests."""
    if _last:
        terminalreporter.section("each worker's last test, and how long before the end of all")
        ends = sorted(_last.values(), reverse=True)
        for stop_s, nodeid in ends:
            terminalreporter.write(f"-{ends[0][0] - stop_s:.0f} s {nodeid}\n")
    found = [
        line.removeprefix(MARK)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for line in report.capstdout.splitlines()
        if line.startswith(MARK)
    ]
    if found:
        terminalreporter.section("faults, and what they did")
        terminalreporter.write("\n".join(found) + "\n")


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """A prefix for topics and groups that no other test uses, and that names the test."""
    name = re.sub(r"[^A-Za-z0-9-]", "-", request.node.name)[:60]
    return f"{name}-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def bootstrap(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a broker, which several workers share: half of what one costs is its start,
    and what it does while nobody asks for anything.
    """

    def start() -> str:
        broker: LocalKafka = request.getfixturevalue("kafka_broker")
        return broker.bootstrap_servers

    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    # A test of faults keeps a broker busy by itself.
    if not worker or request.config.option.markexpr == "faults":
        yield start()
        return
    number = int(worker.removeprefix("gw")) % BROKERS
    with shared(tmp_path_factory.getbasetemp().parent / f"broker-{number}", start) as address:
        yield address


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark session, and so one JVM, for all tests of a process."""
    from kafkamq.spark.session import build_session

    session = build_session(
        app_name="kafkamq tests",
        master="local[2]",
        settings={"spark.sql.shuffle.partitions": "2"},
    )
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def active_session(request: pytest.FixtureRequest) -> Iterator[None]:
    """The JVM looks formats up in the session that was made last: a test may make others."""
    if "spark" not in request.fixturenames:
        yield
        return
    from kafkamq.spark.session import active

    with active(request.getfixturevalue("spark")):
        yield
