"""What a local broker takes from its machine: a folder for downloads, and a Java new enough.

The library never reads the environment: the CLI and the pytest plugin pass ``os.environ`` in.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from kafkamq.errors import KafkaMQError

MIN_JAVA = 17  # Kafka 4 and Spark 4 both need it
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
_HINT = (
    f"Install Java {MIN_JAVA} or newer (Debian and Ubuntu: apt-get install "
    "openjdk-17-jre-headless) or set JAVA_HOME to one."
)


class JavaError(KafkaMQError):
    """Java is missing or too old."""


def cache_dir_from(environ: Mapping[str, str]) -> Path | None:
    """The folder for downloads: ``KAFKAMQ_CACHE``, else ``kafkamq`` in ``XDG_CACHE_HOME``.

    None means the default of `fetch_kafka`, ``~/.cache/kafkamq``.
    """
    if own := environ.get("KAFKAMQ_CACHE"):
        return Path(own).expanduser()
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    # The specification of XDG folders: a relative path is invalid and ignored.
    return xdg / "kafkamq" if xdg.is_absolute() else None


def java_from(environ: Mapping[str, str]) -> str:
    """The Java to run: that of ``JAVA_HOME`` (as Spark does), else the one on the path."""
    home = environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


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
