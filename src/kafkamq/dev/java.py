"""Finds Java and checks its version."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess

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
