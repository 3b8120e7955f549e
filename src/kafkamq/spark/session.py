"""Builds the Spark session that the tracker, the views and users' own pipelines run in.

What has to be right before Spark starts is set here: the Python of the workers, state in RocksDB,
no adaptive plans and no speculation (the sink relies on both being off), a quiet JVM.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kafkamq.errors import ConfigError
from kafkamq.runtime.signals import holding_interrupts, keeping_interrupts
from kafkamq.spark.cluster import package_archive
from kafkamq.spark.daemon import THREADLESS
from kafkamq.spark.failures import is_spark_gone, jvm_errors

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

MIN_JAVA = 17
REDACTED = r"(?i)secret|password|passwd|token|access[.]?key|jaas|oauthbearer|credential|[.]key"
_INSTALL = "install with: pip install 'kafkamq[spark]'"
# Distribution -> lowest version, first version that is too new.
_NEEDED: Mapping[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "pyspark": ((4, 2), (4, 3)),
    "pandas": ((2, 2), (3,)),
    "pyarrow": ((18,), None),
    "protobuf": ((6, 30), (8,)),
}
_MODULES = {"protobuf": "google.protobuf"}
# A small heap, and no second compiler: most of the work is done in Python, starting up counts. And
# no collection of everything whenever the classes that it loads outgrow a limit, at first 21 MB.
_JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:MetaspaceSize=256m"
# Without Hadoop's checksum files: each file of a checkpoint costs two processes (chmod) with them.
# The state's change logs carry checksums of their own.
_LOCAL_FILES = "org.apache.hadoop.fs.local.RawLocalFs"
SHUFFLE = "spark.sql.shuffle.partitions"
# Spark makes 200 tasks of a shuffle, and Delta 50 of a table's log, twice for each batch: on one
# machine these take longer than all the rest of a small batch.
_FEW_TASKS = {SHUFFLE: "8", "spark.databricks.delta.snapshotPartitions": "2"}
_MASTER = re.compile(
    r"local(\[(\d+|\*)(,\s*\d+)?\])?|local-cluster\[.*\]|spark://\S+:\d+|yarn|k8s://.+"
)
# To connect to a standalone master; Spark itself gives up after a minute.
_MASTER_S = 10.0
# Of a JVM that is ended while it starts.
_END_S = 5.0
_LOGGING = Path(__file__).with_name("log4j2.properties")
_log = logging.getLogger(__name__)
_jvm_log = logging.getLogger("kafkamq.spark.jvm")
# Printed by the JVM and by PySpark itself, past every log setting.
_NOISE = re.compile(
    r"WARNING: Using incubator|(Starting )?Streaming TransformWithState|\s*$"
    r"|\s+at [\w.$/<>]+\(|\s+\.\.\. \d+ more"
    # A stop prints this.
    r"|WARN TaskSetManager: .*TaskKilled \(Stage cancelled: \[SPARK_JOB_CANCELLED\]"
    # By one, too: Spark looks for the interrupt in the text of what a batch's function raised.
    r'|Exception in thread "stream execution thread for .*" java.lang.StackOverflowError'
)


def has_session() -> bool:
    """Return whether this process has a session, which who finds it must not stop."""
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None


def build_session(
    *,
    app_name: str = "kafkamq",
    master: str = "local[2]",
    driver_memory: str = "1g",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Starts Spark, or returns a session on the Spark that this process has, with our settings.

    A session that somebody else made keeps its settings: the one that is returned stands beside
    it, on the same Spark (``SparkSession.newSession``), with settings, formats and temporary views
    of its own. With the master of a cluster this package is shipped to the workers.

    Args:
        app_name: Name of the application in Spark's own pages and logs.
        master: Where Spark runs: ``local[N]``, ``spark://host:port``, ``yarn``, ``k8s://...``;
            ``spark.master`` of the settings stands above it.
        driver_memory: Heap of the driver; with a local master of everything but Python.
        settings: Spark properties that stand above kafkamq's own.

    Raises:
        ConfigError: Java or a Python package is missing or has an unsupported version; the master
            is none, or does not answer; this process has a session elsewhere than on the cluster
            that was asked for.
    """
    check_packages()
    given = {name: _text(value) for name, value in (settings or {}).items()}
    master = given.get("spark.master", master)
    _check_master(master)
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._gateway is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        # Else somebody, as spark-submit, has started it.
        _java_version()
    ours = {**session_settings(master=master, driver_memory=driver_memory), **given}
    if has_session() and SparkContext._active_spark_context is not _built:
        spark = SparkSession.builder.getOrCreate().newSession()
        for name, value in ours.items():
            if spark.conf.isModifiable(name):
                # What is of the JVM stays as it was started.
                spark.conf.set(name, value)
    else:
        # Else `python3` of PATH runs the workers; of a cluster's, somebody may know better.
        if master.startswith("local") or "PYSPARK_PYTHON" not in os.environ:
            os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        every = {"spark.app.name": app_name, "spark.master": master, **ours}
        if master.startswith("local") and not has_session():
            every = {**_FEW_TASKS, **every}
        _start_jvm(every, given)
        with keeping_interrupts():
            spark = SparkSession.builder.config(map=dict(every)).getOrCreate()
        globals()["_built"] = spark.sparkContext
    if not str(spark.conf.get("spark.master")).startswith("local"):
        spark.sparkContext.addPyFile(str(package_archive()))
    return spark


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_built: SparkContext | None = None


def end_session(spark: SparkSession) -> None:
    try:
        spark.stop()
    except jvm_errors() as error:
        if not is_spark_gone():
            raise
        _log.info("the session ended with its JVM", extra={"error": str(error)})


def _check_master(master: str) -> None:
    """Refuse what is no master, or is elsewhere than the session that this process has."""
    from pyspark import SparkContext

    if not _MASTER.fullmatch(master):
        raise ConfigError(
            f"master is {master!r}: it must be local[N], spark://host:port, yarn or k8s://..."
        )
    running = SparkContext._active_spark_context if has_session() else None
    if running is None and master.startswith("spark://"):
        _require_master(master)
    elif running is not None and not master.startswith("local") and running.master != master:
        raise ConfigError(
            f"master is {master}, but this process has a Spark session on {running.master}: stop "
            "that one first, or use another process"
        )


def _require_master(master: str) -> None:
    last: Exception | None = None
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_MASTER_S).close()
            return
        except (OSError, ValueError, OverflowError) as error:
            last = error
    raise ConfigError(
        f"master is {master}: nothing answers there ({last}); start one (kafkamq spark master), "
        "correct the address, or run on this machine with local[2]"
    )


class _Launch(subprocess.Popen[bytes]):
    """The process of a JVM that starts, whose end PySpark misses where its code is 0."""

    def poll(self) -> int | None:
        code = super().poll()
        return code if code is None else code or 1

    def end(self) -> None:
        with holding_interrupts():
            self.terminate()
            try:
                self.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.kill()
                self.wait()


def _start_jvm(settings: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Start the JVM as PySpark would, but with what it prints sent to a logger.

    What the user has set comes in a file, as all users of a machine can read command lines: one
    without a name, where Linux gives its processes a path to it. A Ctrl-C ends the process that
    starts: PySpark would leave it behind.
    """
    from pyspark import SparkConf, SparkContext, java_gateway

    if SparkContext._gateway is not None:
        return
    ours = [(name, value) for name, value in settings.items() if name not in given]
    launches: list[_Launch] = []
    is_linux = sys.platform == "linux"
    new_file = tempfile.TemporaryFile if is_linux else tempfile.NamedTemporaryFile
    with new_file("w", encoding="utf-8") as file:

        def launch(command: list[str], **others: Any) -> _Launch:
            if given:
                path = f"/proc/self/fd/{file.fileno()}" if is_linux else file.name
                command = [command[0], *_with_file(path, command[1:], given, file)]
            # The Python processes that Spark starts beside the driver have the JVM's environment.
            paths = [str(Path(__file__).with_name("at_start")), os.environ.get("PYTHONPATH", "")]
            others["env"]["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            others |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            with holding_interrupts():
                process: _Launch = _Launch(command, pass_fds=[file.fileno()], **others)
                launches.append(process)
            # At once: Spark waits where nobody reads what it prints.
            threading.Thread(
                target=_forward, args=(process.stdout,), name="kafkamq-jvm-log", daemon=True
            ).start()
            return process

        before = vars(java_gateway)["Popen"]
        vars(java_gateway)["Popen"] = launch
        try:
            gateway = java_gateway.launch_gateway(  # type: ignore[no-untyped-call]  # of pyspark
                SparkConf(loadDefaults=False).setAll(ours)
            )
        except BaseException:
            for process in launches:
                process.end()
            raise
        finally:
            vars(java_gateway)["Popen"] = before
    with holding_interrupts():
        SparkContext._ensure_initialized(gateway=gateway)


def _with_file(
    path: str, arguments: Sequence[str], given: Mapping[str, str], file: IO[str]
) -> list[str]:
    """Write settings into the file that is at this path, and name it in spark-submit's arguments.

    Spark reads one such file. Where the arguments name another, what that says comes first in ours.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--properties-file")
    theirs, others = parser.parse_known_args(arguments)
    options = ["--properties-file", path]
    if theirs.properties_file is None:
        options.append("--load-spark-defaults")
    else:
        try:
            file.write(Path(theirs.properties_file).read_text("utf-8") + "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"PYSPARK_SUBMIT_ARGS: --properties-file: {error}") from None
    file.writelines(f"{_escaped(name)}={_escaped(given[name])}\n" for name in given)
    file.flush()
    return [*options, *others]


def _escaped(text: str) -> str:
    """Escape a name or a value of Java's properties: JSON's escapes are Java's, too."""
    return re.sub(r"[ :=#!]", r"\\\g<0>", json.dumps(text)[1:-1])


def _forward(stream: IO[bytes]) -> None:
    for line in stream:
        text = line.decode("utf-8", "replace").rstrip()
        if not _NOISE.match(text):
            _jvm_log.warning("%s", text)


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Make it this thread's session in the JVM, where registered formats are looked up.

    A session of Spark Connect needs nothing: its server does it.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:
        yield
        return
    sessions = getattr(jvm, "org.apache.spark.sql.classic.SparkSession")
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def session_settings(*, master: str, driver_memory: str) -> dict[str, str]:
    settings = {
        "spark.driver.memory": driver_memory,
        "spark.driver.extraJavaOptions": f"{_JAVA_OPTIONS} -Dlog4j2.configurationFile={_LOGGING}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.redaction.regex": REDACTED,
        "spark.sql.redaction.options.regex": f"{REDACTED}|url",
        # The sink has one task per marker partition at a time.
        "spark.speculation": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
        "spark.sql.execution.pyspark.binaryAsBytes": "true",
        "spark.sql.session.timeZone": "UTC",
        # Young JVMs pay for it, and the sink wants it off.
        "spark.sql.adaptive.enabled": "false",
    }
    if master.startswith("local"):
        settings |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.python.daemon.module": "kafkamq.spark.daemon",
            "spark.executorEnv.PYTHONPATH": _worker_path(),
            **{f"spark.executorEnv.{name}": value for name, value in THREADLESS.items()},
            "spark.hadoop.fs.AbstractFileSystem.file.impl": _LOCAL_FILES,
        }
    return settings


def _worker_path() -> str:
    """Return where workers on this machine find kafkamq and what is beside it."""
    package_folder = str(Path(__file__).resolve().parents[2])
    own = (sys.prefix, sys.base_prefix)
    others = [entry for entry in sys.path if entry and not entry.startswith(own)]
    return os.pathsep.join(dict.fromkeys([package_folder, *others]))


def check_environment() -> dict[str, str]:
    """Checks Python packages and Java; returns their versions by name."""
    return {**check_packages(), "java": _java_version()}


def check_packages() -> dict[str, str]:
    """``check_environment`` without Java, which only who starts Spark here needs here."""
    return {name: _package_version(name, *limits) for name, limits in _NEEDED.items()}


def _package_version(name: str, lowest: tuple[int, ...], below: tuple[int, ...] | None) -> str:
    wanted = f">={_dotted(lowest)}" + (f",<{_dotted(below)}" if below else "")
    version = _version_of(name)
    if version is None:
        raise ConfigError(f"{name}{wanted} is missing: {_INSTALL}")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < lowest or (below is not None and numbers >= below):
        raise ConfigError(f"{name} is {version}: it must be {wanted}; {_INSTALL}")
    return version


def _version_of(name: str) -> str | None:
    """Get the installer's word; else the module's, as Spark's own images and archives have it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
    try:
        module = importlib.import_module(_MODULES.get(name, name))
    except ImportError:
        return None
    return str(module.__version__)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)


def _java_version() -> str:
    # Spark's launcher prefers it, too.
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise ConfigError(
            f"Java {MIN_JAVA} or newer is missing (JAVA_HOME is {home or 'not set'}): "
            "install a Java runtime, or point JAVA_HOME at one"
        )
    # A Ctrl-C of the terminal is this process's alone: it would silence Java.
    error_text = subprocess.run(
        [java, "-version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        start_new_session=True,
    ).stderr
    match = re.search(r'version "(\d+)([^"]*)"', error_text)
    if match is None or int(match[1]) < MIN_JAVA:
        first_line = error_text.splitlines()[0] if error_text else "silent"
        raise ConfigError(f"{java} is {first_line}: it must be Java {MIN_JAVA} or newer")
    return match[1] + match[2]
