"""Runs Ivy: fetches named modules, several runs side by side.

Ivy is one jar: the one that an installed PySpark bundles, else the published one, which Maven
copies once and which is checked against its SHA-256. Both have settings of their own that know
where published artifacts are; a user with a mirror names a settings file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from kafkamq.dev.errors import ArtifactError
from kafkamq.dev.modules import Module, verify

IVY = Module(
    "org.apache.ivy",
    "ivy",
    "2.5.3",
    "9502aa5aabf0b1484924a13ef4b5d24f121f7f91aab6768f11cc9d0906c0803b",
)

MAX_SIDE_BY_SIDE = 4  # more only fight for the cores: 4 took 3.2 s, 8 took 3.8 s, 12 took 7.1 s
TIMEOUT_S = 600.0
_OUTPUT_TAIL_LINES = 25
_POLL_S = 0.05
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
_COPY_TIMEOUT_S = 300.0
_OR_PYSPARK = ", or install PySpark (kafkamq[spark]), which brings what fetches Kafka"
# Sums are checked against our own list, so Ivy need not fetch its own; nor does it need POMs.
_SETTINGS = """<ivysettings>
  <property name="ivy.checksums" value=""/>
  <settings defaultResolver="central"/>
  <resolvers><ibiblio name="central" m2compatible="true" usepoms="false"/></resolvers>
</ivysettings>
"""
_PATTERN = "[organisation]/[module]/[revision]/[artifact]-[revision].[ext]"

Coordinates = tuple[str, str, str]  # organisation, name, version


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
        copy_with_maven(IVY, work, cache, maven=maven)
        verify(work, [IVY])
        (work / IVY.file_name).replace(cache / IVY.file_name)
    return cache / IVY.file_name


def copy_with_maven(module: Module, work: Path, cache: Path, *, maven: str = "mvn") -> None:
    """Put a published file into ``work``; ``cache`` is where a user may put it by hand.

    Raises:
        ArtifactError: It cannot be fetched.
    """
    wanted = f"-Dartifact={module}"
    command = [maven, "-q", "-B", _COPY, wanted, f"-DoutputDirectory={work}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=work,
            timeout=_COPY_TIMEOUT_S, check=False,
        )  # fmt: skip
        said = "" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-500:]
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        said, failed = str(error), True
    if failed:
        raise ArtifactError(
            f"{module} cannot be fetched by {maven}: {said}. Install Maven, or put "
            f"{module.file_name} into {cache}{_OR_PYSPARK if module == IVY else ''}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ivy:
    """A way to run Ivy. The work folder of a call must be the caller's own, and empty."""

    java: str  # a Java that `java_command` has checked
    jar: Path
    settings: Path | None = None  # the user's own Ivy settings; None: the public repository

    def fetch(
        self, modules: Sequence[Coordinates], work: Path, *, on_fetched: Callable[[int], None]
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

    def resolve(
        self, module: Coordinates, work: Path, *, on_fetched: Callable[[int], None]
    ) -> None:
        """Fetches a module and all that it depends on, as its published POMs say."""
        command = self._command(work, cache="cache", settings=self.settings)
        _run_all([[*command, "-dependency", *module]], work, on_fetched=on_fetched)

    def _command(self, work: Path, *, cache: str, settings: Path | None) -> list[str]:
        command = [self.java, "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        command += ["-jar", str(self.jar), "-confs", "default", "-cache", str(work / cache)]
        command += ["-retrieve", str(work / "out" / _PATTERN)]
        return command if settings is None else [*command, "-settings", str(settings)]


def fetched(work: Path) -> list[tuple[Coordinates, Path]]:
    """The modules that runs with this work folder have fetched, and their jars."""
    return [
        ((jar.parts[-4], jar.parts[-3], jar.parts[-2]), jar)
        for jar in sorted((work / "out").glob("*/*/*/*.jar"))
    ]


def _descriptor(index: int, modules: Iterable[Coordinates]) -> str:
    lines = [
        f"    <dependency org={quoteattr(org)} name={quoteattr(name)} rev={quoteattr(version)}"
        ' transitive="false"/>\n'
        for org, name, version in modules
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
            processes.enter_context(process)  # waits for it at the end,
            processes.callback(process.kill)  # after this
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
