"""`LocalKafka` is a real single-node broker on the loopback."""

from __future__ import annotations

import base64
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kafkamq.dev.artifacts import DEFAULT_VERSION, KafkaJars, Progress, fetch_kafka
from kafkamq.dev.environment import (
    HOST,
    BrokerProcess,
    LocalKafkaError,
    free_port_pair,
    free_ports,
    java_command,
)
from kafkamq.errors import ConfigError, StateError

MAX_START_ATTEMPTS = 5
FORMAT_TIMEOUT_S = 60.0
# With these it boots in 1.8 s instead of 2.7 s.
QUICK_JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_LOGGING = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSS",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config.AbstractConfig=warn",
    "-Dlog4j2.StatusLogger.level=OFF",
)
MAX_LINES = 15
MAX_LINE_LENGTH = 500
_RECORD = re.compile(r"(\S+ )?\[[^\]]+\] (TRACE|DEBUG|INFO|WARN|ERROR) |(ERROR) ")
_log = logging.getLogger(__name__)


class LocalKafka:
    """A Kafka broker and controller in one process of its own, for development and tests.

    It listens on 127.0.0.1 only, unless it is a ``node``, and ends with this process, however that
    ends. Its data folder is temporary unless you name one. Not thread-safe: one thread controls it.

        with LocalKafka() as kafka:
            producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    """

    def __init__(
        self,
        version: str = DEFAULT_VERSION,
        *,
        port: int = 0,
        data_dir: Path | str | None = None,
        keep: bool = False,
        properties: Mapping[str, str] | None = None,
        listeners: Sequence[Listener] = (),
        node: Node | None = None,
        launcher: Sequence[str] = (),
        heap: str = "384m",
        jvm_options: Sequence[str] = QUICK_JVM,
        cache_dir: Path | str | None = None,
        java: str = "java",
        ivy_settings: Path | str | None = None,
        start_timeout: float = 60.0,
        stop_timeout: float = 15.0,
        on_progress: Progress | None = None,
    ) -> None:
        """Describes a broker; `start` or ``with`` starts it.

        Args:
            version: Of Kafka, as published; fetched into the cache when it is used first.
            port: Where clients connect; 0: a free one.
            data_dir: Its folder; kept, and opened again when it has data. None: a temporary one.
            keep: Keeps a temporary folder too (`data_dir` says where it is).
            properties: Broker properties over our defaults (`kafkamq.dev.broker`).
            listeners: More doors, each on a free port: `address_of` says where.
            node: Its place in a cluster, whose addresses are yours; None: it is alone.
            launcher: A command that Java's is appended to, such as ``nsenter ... --``.
            heap: The largest heap, as Java writes it.
            jvm_options: Java options; the default boots fast, at some cost in throughput.
            cache_dir: Of downloads; see `fetch_kafka`, as for ``ivy_settings``, ``on_progress``.
            java: The Java to run.
            start_timeout: Seconds until the broker must answer, downloads aside.
            stop_timeout: Seconds until a clean stop becomes a kill.
        """
        self.version = version
        self._port = port
        self._given_dir = None if data_dir is None else Path(data_dir).absolute()
        self._keep = keep or data_dir is not None
        self._overrides = dict(properties or {})
        self._listeners = tuple(listeners)
        self._node = node
        self._launcher = tuple(launcher)
        self._jvm = [f"-Xmx{heap}", *jvm_options, *_LOGGING]
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._java = java
        self._ivy_settings = None if ivy_settings is None else Path(ivy_settings)
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._on_progress = on_progress
        self._folder: Path | None = None
        self._ports: tuple[int, int] | None = None
        self._more_ports: tuple[int, ...] = ()
        self._process: BrokerProcess | None = None

    # What it is

    @property
    def bootstrap_servers(self) -> str:
        """Return the address for clients; the same over restarts."""
        if self._ports is None:
            raise StateError("the broker has not been started")
        return f"{self._host}:{self._ports[0]}"

    def address_of(self, listener: str) -> str:
        """Return the address of one of the ``listeners``; the same over restarts.

        Raises:
            StateError: the broker has not been started.
            ConfigError: there is no such listener.
        """
        port = self.port_of(listener)
        one = next(one for one in self._listeners if one.name == listener)
        return one.advertised or f"{self._host}:{port}"

    def port_of(self, listener: str) -> int:
        """Return where one of the ``listeners`` listens, wherever it sends clients to.

        Raises:
            StateError, ConfigError: as `address_of`.
        """
        if self._ports is None:
            raise StateError("the broker has not been started")
        for one, port in zip(self._listeners, self._more_ports, strict=True):
            if one.name == listener:
                return port
        raise ConfigError(f"no listener is called {listener!r}")

    @property
    def data_dir(self) -> Path:
        """Return the folder with the data, the properties and the log of the broker."""
        if self._folder is None:
            raise StateError("the broker has not been started, or its folder has been removed")
        return self._folder

    @property
    def log_path(self) -> Path:
        return self.data_dir / "broker.log"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """Return whether the process exists; a paused one does."""
        return self._process is not None and self._process.is_running

    # Its life

    def start(self) -> LocalKafka:
        """Starts the broker and returns when it answers.

        Raises:
            StateError: it runs already.
            ConfigError: nothing can be written in `data_dir`.
            ArtifactError: its jars cannot be fetched, or are not what they should be.
            JavaError: Java is missing or too old.
            LocalKafkaError: it did not start; with the errors of its log. The folder is kept.
        """
        if self.is_running:
            raise StateError("the broker runs already")
        jars = fetch_kafka(
            self.version,
            cache_dir=self._cache_dir,
            java=self._java,
            ivy_settings=self._ivy_settings,
            on_progress=self._on_progress,
        )
        java = java_command(self._java)
        if self._folder is None:
            self._folder = _writable(self._given_dir)
        began = time.monotonic()
        for attempt in range(1, MAX_START_ATTEMPTS + 1):
            ports = self._ports or self._choose_ports()
            try:
                self._start_once([*self._launcher, java], jars, self._folder, ports)
                break
            except _PortTakenError:
                if self._ports is not None or attempt == MAX_START_ATTEMPTS:
                    raise
        self._ports = ports
        _log.info(
            "local Kafka is up",
            extra={
                "version": self.version,
                "bootstrap_servers": self.bootstrap_servers,
                "data_dir": str(self._folder),
                "seconds": round(time.monotonic() - began, 2),
            },
        )
        return self

    def stop(self) -> None:
        """Stops the broker, cleanly where its folder stays, and removes a temporary one.

        Does nothing when it is stopped.
        """
        # Data that is thrown away needs no clean stop, which takes seconds for many partitions.
        if not self._keep and self._process is not None:
            self._process.kill()
        try:
            self._end_process()
        finally:
            if self._folder is not None and not self._keep:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    def restart(self) -> None:
        """Stops the broker cleanly if it runs; starts it on the same data and the same ports."""
        self._end_process()
        self.start()

    def kill(self) -> None:
        """Ends the broker as a crash would; its data stays for `restart`."""
        self._running().kill()

    def pause(self) -> None:
        """Freezes the broker: from now on connections stay open, and nothing answers."""
        self._running().pause()

    def resume(self) -> None:
        self._running().send(signal.SIGCONT)

    def __enter__(self) -> LocalKafka:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # How it is done

    @property
    def _host(self) -> str:
        return HOST if self._node is None else self._node.host

    def _choose_ports(self) -> tuple[int, int]:
        if self._node is not None:
            # The broker has an address of its own: nobody else is there.
            first = self._node.controller_port + 1
            self._more_ports = tuple(range(first, first + len(self._listeners)))
            return self._node.port, self._node.controller_port
        port, controller_port = free_port_pair(self._port)
        self._more_ports = free_ports(len(self._listeners), besides=port)
        return port, controller_port

    def _running(self) -> BrokerProcess:
        if self._process is None or not self._process.is_running:
            raise StateError("the broker does not run")
        return self._process

    def _end_process(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.is_running and not process.stop():
            _log.warning(
                "local Kafka did not stop in time and was killed",
                extra={"seconds": self._stop_timeout},
            )

    def _start_once(
        self, java: Sequence[str], jars: KafkaJars, folder: Path, ports: tuple[int, int]
    ) -> None:
        data, file = folder / "data", folder / "server.properties"
        properties = server_properties(
            port=ports[0],
            controller_port=ports[1],
            data=data,
            overrides=self._overrides,
            listeners=list(zip(self._listeners, self._more_ports, strict=True)),
            node=self._node,
        )
        # Listeners may hold secrets.
        file.touch(mode=0o600)
        file.write_text(format_properties(properties), encoding="ascii")
        command = [*java, *self._jvm, "-cp", jars.class_path]
        if not (data / "meta.properties").exists():
            self._format(command, file, log_path=folder / "broker.log")
        log = folder / "broker.log"
        log_from = log.stat().st_size if log.exists() else 0
        self._process = BrokerProcess(
            [*command, "kafka.Kafka", str(file)],
            log_path=log,
            grace_s=self._stop_timeout,
            remove=None if self._keep else folder,
        )
        try:
            self._wait_until_ready(self._process, ports[0], log_from)
        except BaseException:
            # Also on Ctrl-C: nobody else would stop it.
            self._process.kill()
            self._process = None
            raise

    def _format(self, command: Sequence[str], file: Path, *, log_path: Path) -> None:
        cluster = new_cluster_id() if self._node is None else self._node.cluster_id
        with log_path.open("ab") as log:
            log_from = log.tell()
            tool = ["kafka.tools.StorageTool", "format", "-g", "-t", cluster, "-c", str(file)]
            try:
                code = subprocess.run(
                    [*command, *tool], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    timeout=FORMAT_TIMEOUT_S, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = -1
        if code != 0:
            raise self._failure("its data folder could not be formatted", log_from)

    def _wait_until_ready(self, process: BrokerProcess, port: int, log_from: int) -> None:
        deadline = time.monotonic() + self._start_timeout
        is_open = False
        while time.monotonic() < deadline:
            if not process.is_running:
                raise self._failure(f"it ended with exit code {process.exit_code}", log_from)
            is_open = is_open or _is_open(self._host, port)
            if is_open and _answers(f"{self._host}:{port}", timeout_s=1.0):
                return
            time.sleep(0.02)
        raise self._failure(f"it does not answer after {self._start_timeout:g} s", log_from)

    def _failure(self, what: str, log_from: int) -> LocalKafkaError:
        path = self.log_path
        with path.open("rb") as file:
            file.seek(log_from)
            text = file.read().decode("utf-8", errors="replace")
        kind = _PortTakenError if "Address already in use" in text else LocalKafkaError
        return kind(
            f"Kafka {self.version} did not start: {what}. Its log, {path}, says:\n{errors_in(text)}"
        )


class _PortTakenError(LocalKafkaError):
    """Another process bound a port between its choice and our use."""


def _writable(given: Path | None) -> Path:
    folder = given or Path(os.environ.get("TMPDIR", "/tmp"))
    try:
        folder = given or Path(tempfile.mkdtemp(prefix="kafkamq-"))
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"data_dir is {folder}: it must be a folder to write in ({error})"
        ) from None
    return folder


def new_cluster_id() -> str:
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
    # A leading hyphen would look like an option.
    return "k" + cluster[1:]


def _is_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except OSError:
        return False
    return True


def _answers(bootstrap_servers: str, *, timeout_s: float) -> bool:
    """Say whether a client gets metadata with a live broker in it; an open port says too little."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    try:
        client = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
        return bool(client.list_topics(timeout=timeout_s).brokers)
    except KafkaException:
        return False


def errors_in(text: str) -> str:
    """Return the last errors and the exceptions below them; the end of the log when it has none."""
    chosen: list[str] = []
    is_error = False
    for line in text.splitlines():
        record = _RECORD.match(line)
        if record is not None:
            is_error = "ERROR" in (record[2], record[3])
        if is_error and not line.startswith(("\t", "    at ")):
            chosen.append(line)
    if not chosen:
        chosen = [line for line in text.splitlines() if line.strip()]
    return "\n".join(line[:MAX_LINE_LENGTH] for line in chosen[-MAX_LINES:])


_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_OUR_LISTENERS = ("PLAINTEXT", "CONTROLLER")

OWNED = frozenset((
    "advertised.listeners", "controller.listener.names", "controller.quorum.voters",
    "inter.broker.listener.name", "listener.security.protocol.map", "listeners", "log.dir",
    "log.dirs", "metadata.log.dir", "node.id", "process.roles",
))  # fmt: skip
"""Properties that decide who talks to whom and where data is; a user cannot change them."""


@dataclass(frozen=True, kw_only=True)
class Listener:
    """One more door of a broker, beside the open one that it uses itself.

    Its properties (certificates, SASL mechanisms, JAAS) are Kafka's names without the prefix
    ``listener.name.NAME.``. They may hold secrets, so they are not shown.
    """

    name: str
    protocol: str
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    # The host and port that clients are sent to, such as a proxy's; empty: the listener's.
    advertised: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Z][A-Z0-9]*", self.name) or self.name in _OUR_LISTENERS:
            taken = " or ".join(_OUR_LISTENERS)
            raise ConfigError(
                f"listener name is {self.name!r}: capital letters and digits, not {taken}"
            )
        if self.protocol not in _PROTOCOLS:
            known = ", ".join(_PROTOCOLS)
            raise ConfigError(f"listener protocol is {self.protocol!r}: one of {known}")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A broker's place in a cluster: who it is, where it is, and who votes."""

    node_id: int
    host: str
    voters: Mapping[int, str]
    # 22 characters of base64, the same for all.
    cluster_id: str
    port: int = 9092
    controller_port: int = 9093


_DEFAULTS = {
    # One node: nothing can have a second copy.
    "default.replication.factor": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # Internal topics are created at their first use; 50 partitions would take seconds.
    "offsets.topic.num.partitions": "5",
    "transaction.state.log.num.partitions": "5",
    "share.coordinator.state.topic.num.partitions": "5",
    # Tests start groups all the time, and a misspelt topic must fail.
    "group.initial.rebalance.delay.ms": "0",
    # A member gets its partitions at its next heartbeat: after 5 s by default.
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.share.min.heartbeat.interval.ms": "500",
    "group.share.heartbeat.interval.ms": "500",
    # A dead member's partitions have no reader until its session ends; 45 s by default.
    "group.consumer.min.session.timeout.ms": "3000",
    "group.share.min.session.timeout.ms": "3000",
    "auto.create.topics.enable": "false",
    # A dead producer's transaction ends soon after its timeout, not up to 10 s later.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    # After a kill the controller refuses the broker until its old session ends: 9 s by default.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # A controller that has nothing to do writes a record each 500 ms by default.
    "metadata.max.idle.interval.ms": "30000",
    # Small: the default for compaction alone is a buffer of 128 MB.
    "log.cleaner.dedupe.buffer.size": "4194304",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "4",
}


def server_properties(
    *,
    port: int,
    controller_port: int,
    data: Path,
    overrides: Mapping[str, str],
    listeners: Sequence[tuple[Listener, int]] = (),
    node: Node | None = None,
) -> dict[str, str]:
    """Return all properties of the broker; ``overrides`` win over our defaults.

    Raises:
        ConfigError: an override is one of `OWNED`, or the data folder's path has a comma.
    """
    for name in overrides:
        if name in OWNED:
            raise ConfigError(f"property {name!r} belongs to LocalKafka and cannot be set")
    if "," in str(data):
        raise ConfigError(f"data_dir is {str(data)!r}: Kafka splits folders at commas")
    host = HOST if node is None else node.host
    voters = {1: f"{host}:{controller_port}"} if node is None else node.voters
    bound = {"PLAINTEXT": f"{host}:{port}", "CONTROLLER": f"{host}:{controller_port}"}
    advertised = {"PLAINTEXT": bound["PLAINTEXT"]}
    protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
    special: dict[str, str] = {}
    for listener, number in listeners:
        bound[listener.name] = f"{host}:{number}"
        advertised[listener.name] = listener.advertised or bound[listener.name]
        protocols[listener.name] = listener.protocol
        prefix = f"listener.name.{listener.name.lower()}."
        special |= {prefix + name: value for name, value in listener.properties.items()}
    return {
        **_DEFAULTS,
        **overrides,
        **special,
        "process.roles": "broker,controller",
        "node.id": str(1 if node is None else node.node_id),
        "controller.quorum.voters": ",".join(f"{id_}@{place}" for id_, place in voters.items()),
        "controller.listener.names": "CONTROLLER",
        "listeners": ",".join(f"{name}://{place}" for name, place in bound.items()),
        "advertised.listeners": ",".join(f"{name}://{at}" for name, at in advertised.items()),
        "listener.security.protocol.map": ",".join(map(":".join, protocols.items())),
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(data),
    }


def format_properties(properties: Mapping[str, str]) -> str:
    """Get the text of a Java properties file, in ASCII, with everything escaped that needs it."""
    return "".join(
        f"{_escape(name, is_key=True)}={_escape(value)}\n" for name, value in properties.items()
    )


def _escape(text: str, *, is_key: bool = False) -> str:
    special = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    if is_key:
        special |= {" ": "\\ ", "=": "\\=", ":": "\\:", "#": "\\#", "!": "\\!"}
    escaped = []
    for index, character in enumerate(text):
        if character in special:
            escaped.append(special[character])
        elif character == " " and index == 0:
            escaped.append("\\ ")
        elif " " <= character <= "~":
            escaped.append(character)
        else:
            # Java reads \uXXXX for each UTF-16 unit.
            units = character.encode("utf-16-be")
            escaped += [f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2)]
    return "".join(escaped)
