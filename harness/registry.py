"""`LocalRegistry`: a real schema registry on the loopback, Apicurio's, kept in memory."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from kafkamq.dev.artifacts import (
    ArtifactError,
    cache_folder,
    copy_with_maven,
    sha256_of,
    turn,
)
from kafkamq.dev.broker import QUICK_JVM
from kafkamq.dev.environment import (
    HOST,
    BrokerProcess,
    JavaError,
    LocalKafkaError,
    free_ports,
    java_command,
    parse_java_version,
)
from kafkamq.errors import StateError

_ARTIFACT = "io.apicurio:apicurio-registry-app:3.3.3:tar.gz:all"
_ARCHIVE = "apicurio-registry-app-3.3.3-all.tar.gz"
_SHA256 = "8bc6751c76d963734224b01d5e7f84ccb3cb61c87d3bd77c36c35f10a5cbed63"
MIN_JAVA = 21  # what its classes are compiled for
_PATH = "/apis/ccompat/v7"  # Confluent's interface
_STOP_TIMEOUT_S = 5.0
_LOG_TAIL = 2000


class LocalRegistry:
    """A registry in one process of its own, for development and tests.

    It listens on 127.0.0.1 only, and ends with this process, however that ends. What it keeps ends
    with its process. Not thread-safe: one thread controls it.

        with LocalRegistry() as local:
            registry = SchemaRegistry(local.url)
    """

    def __init__(
        self,
        *,
        cache_dir: Path | str | None = None,
        java: str = "java",
        start_timeout: float = 120.0,
    ) -> None:
        """Describes a registry; `start` or ``with`` starts it.

        Args:
            cache_dir: Of downloads; as for `LocalKafka`.
            java: The Java to run; one in ``/usr/lib/jvm``, where it is too old.
            start_timeout: Seconds until it must answer, downloads aside.
        """
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._java = java
        self._start_timeout = start_timeout
        self._ports: tuple[int, ...] = ()
        self._folder: Path | None = None
        self._process: BrokerProcess | None = None

    @property
    def url(self) -> str:
        """Return where Confluent's clients reach it; the same over restarts."""
        if not self._ports:
            raise StateError("the registry has not been started")
        return f"http://{HOST}:{self._ports[0]}{_PATH}"

    def start(self) -> LocalRegistry:
        """Starts it, and returns when it answers.

        Raises:
            StateError: it runs already.
            ArtifactError: it cannot be fetched, or is not what was published.
            JavaError: there is no Java that is new enough.
            LocalKafkaError: it did not start; with the end of its log.
        """
        if self._process is not None and self._process.is_running:
            raise StateError("the registry runs already")
        java = _new_enough(self._java)
        jar = _fetched(self._cache_dir)
        self._ports = self._ports or free_ports(2)
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="kafkamq-registry-"))
        command = [java, *QUICK_JVM, "-Xmx384m", f"-Djava.io.tmpdir={self._folder}"]
        for name, port in zip(("quarkus.http", "quarkus.management"), self._ports, strict=True):
            command += [f"-D{name}.host={HOST}", f"-D{name}.port={port}"]
        log_path = self._folder / "registry.log"
        self._process = BrokerProcess(
            [*command, "-Dquarkus.log.level=WARN", "-jar", str(jar)],
            log_path=log_path,
            grace_s=_STOP_TIMEOUT_S,
            remove=self._folder,
        )
        try:
            self._wait_until_ready(self._process, log_path)
        except BaseException:  # also Ctrl-C: nobody else would stop it
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends it, with what it keeps; does nothing when stopped."""
        if self._process is not None:
            self._process.kill()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def pause(self) -> None:
        """Freezes it: from now on connections are taken, and nothing answers."""
        self._running().pause()

    def resume(self) -> None:
        """Lets a paused one go on."""
        self._running().send(signal.SIGCONT)

    def __enter__(self) -> LocalRegistry:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _running(self) -> BrokerProcess:
        if self._process is None or not self._process.is_running:
            raise StateError("the registry does not run")
        return self._process

    def _wait_until_ready(self, process: BrokerProcess, log_path: Path) -> None:
        deadline_s = time.monotonic() + self._start_timeout
        what = f"it does not answer after {self._start_timeout:g} s"
        while time.monotonic() < deadline_s:
            if not process.is_running:
                what = f"it ended with exit code {process.exit_code}"
                break
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/subjects", timeout=2.0).close()
                return
            time.sleep(0.1)
        tail = log_path.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]
        raise LocalKafkaError(f"the schema registry did not start: {what}. Its log ends:\n{tail}")


def _fetched(cache_dir: Path | None) -> Path:
    """Return the registry's jar, in the folder that its checked archive was unpacked into."""
    cache = cache_folder(cache_dir)
    folder = cache / _ARCHIVE.removesuffix(".tar.gz")
    jar = folder / "quarkus-run.jar"
    if not jar.is_file():
        with turn(cache, folder.name) as work:
            archive = cache / _ARCHIVE  # where a user may have put it
            if not jar.is_file():
                if not archive.is_file():
                    copy_with_maven(_ARTIFACT, _ARCHIVE, work, cache)
                    archive = work / _ARCHIVE
                if sha256_of(archive) != _SHA256:
                    raise ArtifactError(f"{archive} is not the published {_ARTIFACT}")
                shutil.unpack_archive(archive, work / "unpacked", filter="data")
                (work / "unpacked").replace(folder)
    return jar


def _new_enough(java: str) -> str:
    """Get the path of a Java that runs the registry: the named one, or one that Debian knows of."""
    for each in (java, *map(str, sorted(Path("/usr/lib/jvm").glob("*/bin/java")))):
        with contextlib.suppress(JavaError):
            path = java_command(each)
            answer = subprocess.run(
                [path, "-version"], capture_output=True, text=True, timeout=60, check=False
            )
            if parse_java_version(answer.stderr + answer.stdout) >= MIN_JAVA:
                return path
    raise JavaError(
        f"No Java {MIN_JAVA} or newer found as {java!r} nor in /usr/lib/jvm: install one, or set "
        "JAVA_HOME to it."
    )
