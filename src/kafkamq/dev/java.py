"""Finds Java and checks its version."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

from kafkamq.dev.errors import JavaError

MIN_JAVA = 17  # Kafka 4 and Spark 4 both need it
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
_HINT = (
    f"Install Java {MIN_JAVA} or newer (Debian and Ubuntu: apt-get install "
    "openjdk-17-jre-headless) or set JAVA_HOME to one."
)


def parse_java_version(output: str) -> int:
    """The major version in what ``java -version`` prints; 0 when it names none.

    Up to Java 8 the major version was the second number: ``1.8.0_392``.
    """
    found = _VERSION.search(output)
    if found is None:
        return 0
    first, second = int(found[1]), int(found[2] or 0)
    return second if first == 1 else first


def newer_java_command(minimum: int, java: str = "java") -> str:
    """The path of a Java of this version at least: the named one, or one that Debian knows of."""
    others = sorted(Path("/usr/lib/jvm").glob("*/bin/java"))
    for each in (java, *map(str, others)):
        try:
            path = java_command(each)
        except JavaError:
            continue
        if java_version(path) >= minimum:
            return path
    raise JavaError(
        f"No Java {minimum} or newer found as {java!r} nor in /usr/lib/jvm: install one, or set "
        "JAVA_HOME to it."
    )


@functools.lru_cache(maxsize=8)
def java_version(path: str) -> int:
    """The major version of a Java; 0: it does not say."""
    answer = subprocess.run(
        [path, "-version"], capture_output=True, text=True, timeout=60, check=False
    )
    return parse_java_version(answer.stderr + answer.stdout)


@functools.lru_cache(maxsize=8)
def java_command(java: str = "java") -> str:
    """The path of a usable Java."""
    path = shutil.which(java)
    if path is None:
        raise JavaError(f"No Java found as {java!r}. {_HINT}")
    try:
        answer = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"{path} -version does not run: {error}. {_HINT}") from error
    text = answer.stderr + answer.stdout
    version = parse_java_version(text)
    if version < MIN_JAVA:
        said = text.strip().splitlines()
        raise JavaError(
            f"Java {version or 'of unknown version'} at {path} is not enough "
            f"({said[0] if said else 'it says nothing'}). {_HINT}"
        )
    return path
