"""A standalone cluster out of the installed PySpark, and what its workers need of this package.

PySpark's wheel has all of Spark: ``spark-class`` starts masters and workers as well as drivers.
This package is shipped by every session with a cluster's master; what it imports (confluent-kafka,
pandas, PyArrow, protobuf) must be on the workers, installed or as an archive of an environment.
"""

from __future__ import annotations

import atexit
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from kafkamq.errors import ConfigError

_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"


def _spark_home() -> Path:
    try:
        import pyspark
    except ImportError:
        raise ConfigError(
            "pyspark is missing: install with: pip install 'kafkamq[spark]'"
        ) from None
    return Path(pyspark.__file__).resolve().parent


def _spark_class(name: str) -> list[str]:
    program = _spark_home() / "bin" / "spark-class"
    if not program.exists():
        raise ConfigError(f"{program} is missing: install PySpark from its wheel")
    return [str(program), name]


def master_command(*, host: str, port: int, web_port: int) -> list[str]:
    ports = ["--port", str(port), "--webui-port", str(web_port)]
    return [*_spark_class(_MASTER), "--host", host, *ports]


def worker_command(
    master: str, *, cores: int, memory: str, host: str = "", work_folder: str = ""
) -> list[str]:
    """Return the program and arguments of a worker.

    Raises:
        ConfigError: The master is no address, the memory no size, or PySpark is not installed.
    """
    if not re.fullmatch(r"spark://\S+:\d+", master):
        raise ConfigError(f"master is {master!r}: it must be spark://host:port")
    if not re.fullmatch(r"\d+[kmgt]b?", memory.lower()):
        raise ConfigError(f"memory is {memory!r}: it must be a number with its unit, as 512m or 2g")
    command = [*_spark_class(_WORKER), master, "--cores", str(cores), "--memory", memory]
    command += ["--webui-port", "0"]
    if host:
        command += ["--host", host]
    if work_folder:
        command += ["--work-dir", work_folder]
    return command


def daemon_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a master or a worker: this Python, and a small heap."""
    return {
        "SPARK_DAEMON_MEMORY": "256m",
        **environment,
        "SPARK_HOME": str(_spark_home()),
        "PYSPARK_PYTHON": environment.get("PYSPARK_PYTHON", sys.executable),
    }


@cache
def package_archive() -> Path:
    """This package as a zip that workers import from; it lives as long as this process."""
    source = Path(__file__).resolve().parents[1]
    if not source.is_dir():
        # It is in such an archive already.
        return source.parent
    folder = tempfile.mkdtemp(prefix="kafkamq-ship-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = Path(folder) / "kafkamq.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(source.rglob("*")):
            if path.suffix in (".py", ".properties", ".typed", ".json"):
                archive.write(path, "/".join(("kafkamq", *path.relative_to(source).parts)))
    return target
