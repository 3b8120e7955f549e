"""What an import costs: nothing heavy, and nothing of an extra that is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.waiting import within

EXTRAS = ("typer", "rich", "pydantic", "zstandard", "prometheus_client")
EXTRAS += ("pyspark", "pandas", "pyarrow", "numpy", "opentelemetry")
WITHOUT = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def ran(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=within(60), check=False)


def test_importing_the_package_loads_no_other() -> None:
    done = ran(
        "import sys; before = set(sys.modules); import kafkamq;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names))"
    )
    assert done.stdout.split() == ["kafkamq"]


@pytest.mark.parametrize(
    "names",
    [
        "kafkamq: Service, Queue, Producer, Consumer, Worker, ParallelConsumer, trace_headers",
        "kafkamq.aio: Service, ParallelConsumer",
        "kafkamq.claims: Consumer",
        "kafkamq.dev: LocalKafka",
        "kafkamq.markers.tracker.local: LocalTracker",
        "kafkamq.metrics: Counter, health",
        "kafkamq.testing: MemoryService",
        "harness.faults: KafkaCluster",
    ],
)
def test_without_any_extra(names: str) -> None:
    module, _, wanted = names.partition(": ")
    done = ran(f"{WITHOUT}\nfrom {module} import {wanted}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ("parallel", "kafkamq.ParallelConsumer('t', group_id='g', bootstrap_servers='b:1')"),
        ("metrics", "import kafkamq.metrics; kafkamq.metrics.serve_metrics(0)"),
    ],
)
def test_the_error_names_the_extra(extra: str, code: str) -> None:
    done = ran(f"{WITHOUT}\nimport kafkamq\n{code}")
    assert f"pip install 'kafkamq[{extra}]'" in done.stderr.splitlines()[-1]


def test_the_program_loads_neither_spark_nor_the_pages_before_a_command_needs_them() -> None:
    done = ran(
        "import sys; from typer.main import get_command; from kafkamq.cli.app import app;"
        "get_command(app); print(*sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "kafkamq.cli.app" in loaded
    heavy = ("pyspark", "pandas", "pyarrow", "numpy", "litestar", "jinja2", "uvicorn", "argon2")
    assert not loaded & {*heavy, "kafkamq.spark", "kafkamq.web", "prometheus_client"}


def test_the_command_says_in_one_line_what_to_install() -> None:
    done = ran(f"{WITHOUT}\nfrom kafkamq.cli import main; main()")
    assert done.returncode == 1
    assert done.stderr == "kafkamq: the command needs typer: pip install 'kafkamq[cli]'\n"
