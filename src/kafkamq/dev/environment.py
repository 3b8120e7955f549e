"""Settings of the local broker that an environment names; read by the CLI and the pytest plugin.

The library never reads the environment: the callers pass ``os.environ`` in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


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
