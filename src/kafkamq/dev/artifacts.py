"""The published files of a Kafka version come into a cache here, by lists and checked sums.

A version with a committed list is fetched exactly as listed and every jar is checked against its
SHA-256, when it is fetched and each time it is used. A version without one is resolved from its
published POMs with a warning; what came is written down, so that later changes are noticed.

Ivy fetches. It is one jar: the one that an installed PySpark bundles, else the published one, which
Maven copies once. Processes that fetch at the same time take turns (a lock file that the system
releases when its holder dies), and a jar appears in the cache only when it is complete and checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.sax.saxutils import quoteattr

from kafkamq.dev.environment import java_command
from kafkamq.errors import KafkaMQError

DEFAULT_VERSION = "4.2.1"
# More only fight for the cores: 4 took 3.2 s, 8 took 3.8 s, 12 took 7.1 s.
MAX_SIDE_BY_SIDE = 4
TIMEOUT_S = 600.0
_VERSION = re.compile(r"\d+\.\d+\.\d+(-[A-Za-z0-9]+)?")
_LISTS = Path(__file__).parent / "jars"
_OWN_LIST = "modules.txt"
_PART = r"[A-Za-z0-9._-]+"
_LINE = re.compile(rf"({_PART}):({_PART}):({_PART}) ([0-9a-f]{{64}})")
_OUTPUT_TAIL_LINES = 25
_POLL_S = 0.05
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
_COPY_TIMEOUT_S = 300.0
# Sums are checked against our own list, so Ivy need not fetch its own; nor does it need POMs.
_SETTINGS = """<ivysettings>
  <property name="ivy.checksums" value=""/>
  <settings defaultResolver="central"/>
  <resolvers><ibiblio name="central" m2compatible="true" usepoms="false"/></resolvers>
</ivysettings>
"""
_PATTERN = "[organisation]/[module]/[revision]/[artifact]-[revision].[ext]"
_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (jars fetched, jars to fetch); the second is 0 while it is unknown."""


class ArtifactError(KafkaMQError):
    """Published files could not be fetched, or are not what the committed list says."""


@dataclass(frozen=True, slots=True)
class Module:
    organisation: str
    name: str
    version: str
    sha256: str = ""

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}.jar"

    def __str__(self) -> str:
        return f"{self.organisation}:{self.name}:{self.version}"


IVY = Module(
    "org.apache.ivy",
    "ivy",
    "2.5.3",
    "9502aa5aabf0b1484924a13ef4b5d24f121f7f91aab6768f11cc9d0906c0803b",
)


@dataclass(frozen=True, slots=True)
class KafkaJars:
    version: str
    folder: Path
    modules: tuple[Module, ...]
    is_verified: bool

    @property
    def class_path(self) -> str:
        return os.pathsep.join(str(self.folder / module.file_name) for module in self.modules)


def fetch_kafka(
    version: str = DEFAULT_VERSION,
    *,
    cache_dir: Path | None = None,
    java: str = "java",
    ivy_settings: Path | None = None,
    on_progress: Progress | None = None,
) -> KafkaJars:
    """Return the jars of ``version``, from the cache or, what is missing, from the public
    repository.

    Args:
        version: As published, for example ``4.2.1``.
        cache_dir: Shared by all versions and processes; ``~/.cache/kafkamq`` by default.
        java: The Java that runs Ivy.
        ivy_settings: Your own Ivy settings file, for a mirror.
        on_progress: Called in this thread while jars are fetched.

    Raises:
        ArtifactError: a download failed, or a jar is not the listed one.
        JavaError: Java is missing or too old; only when something has to be fetched.
    """
    if _VERSION.fullmatch(version) is None:
        raise ArtifactError(f"{version!r} is not a version of Kafka: give one like 4.2.1")
    cache = cache_folder(cache_dir)
    name = f"kafka-{version}"
    own_list = cache / name / _OWN_LIST
    listed = committed_list(version)
    if listed is None and not own_list.is_file():
        with turn(cache, name) as work:
            if not own_list.is_file():
                # Another process may have had its turn.
                ivy = Ivy(java=java_command(java), jar=ivy_jar(cache, work), settings=ivy_settings)
                _resolve(version, ivy, cache / name, work, on_progress or _silent)
    modules = listed or parse_list(own_list.read_text(encoding="ascii"), source=str(own_list))
    folder = fetch_modules(
        name,
        modules,
        cache_dir=cache,
        java=java,
        ivy_settings=ivy_settings,
        on_progress=on_progress,
    )
    return KafkaJars(version, folder, modules, is_verified=listed is not None)


def fetch_modules(
    name: str,
    modules: Sequence[Module],
    *,
    cache_dir: Path | None = None,
    java: str = "java",
    ivy_settings: Path | None = None,
    on_progress: Progress | None = None,
) -> Path:
    """Return the folder ``name`` of the cache, which holds the jars of a list, each of them
    checked.

    Raises:
        ArtifactError, JavaError: as `fetch_kafka`.
    """
    cache, tell = cache_folder(cache_dir), on_progress or _silent
    folder = cache / name
    if not verify(folder, modules):
        return folder
    with turn(cache, name) as work:
        missing = verify(folder, modules)
        if not missing:
            return folder
        _log.info("fetching jars", extra={"modules": len(missing), "folder": str(folder)})
        ivy = Ivy(java=java_command(java), jar=ivy_jar(cache, work), settings=ivy_settings)
        tell(0, len(missing))
        ivy.fetch(missing, work, on_fetched=lambda count: tell(count, len(missing)))
        jars = {str(module): jar for module, jar in fetched(work)}
        for module in missing:
            jar = jars.get(str(module))
            if jar is None:
                raise ArtifactError(f"Ivy reports success but has not fetched {module}")
            verify(jar.parent, [module])
            jar.replace(folder / module.file_name)
    return folder


def cache_folder(cache_dir: Path | None) -> Path:
    """Return the cache: the named folder, or ``~/.cache/kafkamq``."""
    return (cache_dir or Path.home() / ".cache" / "kafkamq").absolute()


def _silent(done: int, total: int) -> None: ...


@contextlib.contextmanager
def turn(cache: Path, name: str) -> Iterator[Path]:
    """Waits until no other process fetches into this folder; yields one to fetch into.

    It lies beside the cached jars, so that a jar moves into place in one step.
    """
    (cache / name).mkdir(parents=True, exist_ok=True)
    prefix = f".fetch-{name}-"
    with (cache / f"{name}.lock").open("ab") as file:
        # The lock is released with the file, even by kill -9.
        fcntl.flock(file, fcntl.LOCK_EX)
        # A process that was killed has left these: it is our turn now.
        for left in cache.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=cache) as work:
            yield Path(work)


def _resolve(version: str, ivy: Ivy, folder: Path, work: Path, tell: Progress) -> None:
    """Fetches what the published POMs name, and writes the list of it."""
    _log.warning(
        "no list of checked jars for this version of Kafka: its artifacts are not verified",
        extra={"version": version},
    )
    kafka = Module("org.apache.kafka", "kafka_2.13", version)
    ivy.resolve(kafka, work, on_fetched=lambda count: tell(count, 0))
    apis = [each.version for each, _ in fetched(work) if each.name == "slf4j-api"]
    if not apis:
        raise ArtifactError(f"Kafka {version} came without slf4j-api; this version is unknown")
    # Without a binding a broken broker dies in silence.
    second = work / "binding"
    second.mkdir()
    ivy.fetch([Module("org.slf4j", "slf4j-simple", apis[0])], second, on_fetched=lambda count: None)
    modules = []
    for module, jar in fetched(work) + fetched(second):
        modules.append(replace(module, sha256=sha256_of(jar)))
        jar.replace(folder / module.file_name)
    text = format_list(version, modules)
    parse_list(text, source=f"Kafka {version}")
    written = work / _OWN_LIST
    written.write_text(text, encoding="ascii")
    written.replace(folder / _OWN_LIST)


# Lists.


def parse_list(text: str, *, source: str) -> tuple[Module, ...]:
    """Reads a list; empty lines and lines that begin with ``#`` are skipped."""
    modules: list[Module] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise ArtifactError(f"{source}:{number}: not 'org:name:version sha256': {line!r}")
        modules.append(Module(*found.groups()))
    if len({module.file_name for module in modules}) != len(modules):
        raise ArtifactError(f"{source}: two modules have the same file name")
    if not modules:
        raise ArtifactError(f"{source}: the list is empty")
    return tuple(modules)


def format_list(version: str, modules: Iterable[Module]) -> str:
    lines = sorted(f"{module} {module.sha256}" for module in modules)
    head = (
        f"# Apache Kafka {version} as published: org:name:version and the SHA-256 of its jar.\n"
        f"# Written by: python tools/kafka_jars.py {version}\n"
    )
    return head + "".join(f"{line}\n" for line in lines)


def committed_list(version: str) -> tuple[Module, ...] | None:
    """Return the list that comes with this package, or None for a version without one."""
    path = _LISTS / f"kafka-{version}.txt"
    if not path.is_file():
        return None
    return parse_list(path.read_text(encoding="ascii"), source=path.name)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def verify(folder: Path, modules: Sequence[Module]) -> list[Module]:
    """Checks jars; returns those that are not there. One that differs is removed, and raises."""
    missing: list[Module] = []
    for module in modules:
        path = folder / module.file_name
        if not path.is_file():
            missing.append(module)
            continue
        got = sha256_of(path)
        if got != module.sha256:
            path.unlink(missing_ok=True)
            raise ArtifactError(
                f"{path} is not the published {module}: expected SHA-256 {module.sha256}, "
                f"got {got}. The file has been removed; the next try fetches it."
            )
    return missing


# Ivy.


def ivy_jar(cache: Path, work: Path, *, maven: str = "mvn") -> Path:
    """Ivy's jar; the caller's turn in the cache must be its own.

    Raises:
        ArtifactError: It cannot be fetched, or is not the published one.
    """
    spec = importlib.util.find_spec("pyspark")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        for jar in sorted(Path(folder, "jars").glob("ivy-*.jar")):
            return jar
    if verify(cache, [IVY]):
        copy_with_maven(str(IVY), IVY.file_name, work, cache, maven=maven)
        verify(work, [IVY])
        (work / IVY.file_name).replace(cache / IVY.file_name)
    return cache / IVY.file_name


def copy_with_maven(
    artifact: str, file_name: str, work: Path, cache: Path, *, maven: str = "mvn"
) -> None:
    """Put a published file into ``work``; ``cache`` is where a user may put it by hand.

    Raises:
        ArtifactError: It cannot be fetched.
    """
    wanted = f"-Dartifact={artifact}"
    command = [maven, "-q", "-B", _COPY, wanted, f"-DoutputDirectory={work}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=work,
            timeout=_COPY_TIMEOUT_S, check=False,
        )  # fmt: skip
        output = "" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-500:]
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        output, failed = str(error), True
    if failed:
        pyspark = ", or install PySpark (kafkamq[spark]), which brings what fetches Kafka"
        raise ArtifactError(
            f"{artifact} cannot be fetched by {maven}: {output}. Install Maven, or put "
            f"{file_name} into {cache}{pyspark if artifact == str(IVY) else ''}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ivy:
    """A way to run Ivy. The work folder of a call must be the caller's own, and empty."""

    java: str
    jar: Path
    # The user's own Ivy settings; None: the public repository.
    settings: Path | None = None

    def fetch(
        self, modules: Sequence[Module], work: Path, *, on_fetched: Callable[[int], None]
    ) -> None:
        """Fetches exactly ``modules``, without what they depend on; `fetched` lists the result."""
        settings = self.settings
        if settings is None:
            settings = work / "ivysettings.xml"
            settings.write_text(_SETTINGS, encoding="ascii")
        count = min(MAX_SIDE_BY_SIDE, len(modules))
        commands = []
        for index in range(count):
            descriptor = work / f"batch-{index}.xml"
            descriptor.write_text(_descriptor(index, modules[index::count]), encoding="utf-8")
            command = self._command(work, cache=f"cache-{index}", settings=settings)
            commands.append([*command, "-ivy", str(descriptor)])
        _run_all(commands, work, on_fetched=on_fetched)

    def resolve(self, module: Module, work: Path, *, on_fetched: Callable[[int], None]) -> None:
        """Fetches a module and all that it depends on, as its published POMs say."""
        command = self._command(work, cache="cache", settings=self.settings)
        wanted = (module.organisation, module.name, module.version)
        _run_all([[*command, "-dependency", *wanted]], work, on_fetched=on_fetched)

    def _command(self, work: Path, *, cache: str, settings: Path | None) -> list[str]:
        command = [self.java, "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        command += ["-jar", str(self.jar), "-confs", "default", "-cache", str(work / cache)]
        command += ["-retrieve", str(work / "out" / _PATTERN)]
        return command if settings is None else [*command, "-settings", str(settings)]


def fetched(work: Path) -> list[tuple[Module, Path]]:
    """Return the modules that runs with this work folder have fetched, and their jars."""
    return [(Module(*jar.parts[-4:-1]), jar) for jar in sorted((work / "out").glob("*/*/*/*.jar"))]


def _descriptor(index: int, modules: Iterable[Module]) -> str:
    lines = [
        f"    <dependency org={quoteattr(each.organisation)} name={quoteattr(each.name)} "
        f'rev={quoteattr(each.version)} transitive="false"/>\n'
        for each in modules
    ]
    return (
        f'<ivy-module version="2.0">\n  <info organisation="kafkamq" module="batch-{index}"/>\n'
        f"  <dependencies>\n{''.join(lines)}  </dependencies>\n</ivy-module>\n"
    )


def _run_all(
    commands: Sequence[Sequence[str]], work: Path, *, on_fetched: Callable[[int], None]
) -> None:
    """Runs all commands side by side; no process outlives this call, whatever ends it."""
    logs = [work / f"ivy-{index}.log" for index in range(len(commands))]
    deadline = time.monotonic() + TIMEOUT_S
    with contextlib.ExitStack() as processes:
        running = []
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )
            # It is waited for at the end, after it was killed.
            processes.enter_context(process)
            processes.callback(process.kill)
            running.append((process, log))
        told = 0
        while running:
            time.sleep(_POLL_S)
            for process, log in running:
                if process.poll() not in (None, 0):
                    raise _failure(log, f"Ivy ended with exit code {process.returncode}")
                if time.monotonic() > deadline:
                    raise _failure(log, f"Ivy did not finish within {TIMEOUT_S:.0f} s")
            running = [(process, log) for process, log in running if process.poll() is None]
            count = sum(log.read_bytes().count(b"[SUCCESSFUL ]") for log in logs)
            if count > told:
                told = count
                on_fetched(count)


def _failure(log: Path, what: str) -> ArtifactError:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = "\n".join(lines[-_OUTPUT_TAIL_LINES:])
    return ArtifactError(
        f"Kafka's artifacts could not be fetched: {what}. Is the network reachable? Behind a "
        f"mirror, name your own Ivy settings file. The end of Ivy's output:\n{tail}"
    )
