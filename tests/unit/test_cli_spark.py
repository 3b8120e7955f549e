"""What the commands that start Spark find out before they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kafkamq.cli.app import app
from kafkamq.cli.spark import jobs
from kafkamq.cli.spark.options import spark_settings
from kafkamq.errors import ConfigError


def test_properties_of_spark_come_from_a_file_and_from_options(tmp_path: Path) -> None:
    file = tmp_path / "spark-defaults.conf"
    file.write_text("# ours\nspark.a  1 2\n\nspark.b=2\nspark.ssl.keyPassword : hidden\n")
    assert spark_settings(["spark.b=3", "spark.c = x=y"], file) == {
        "spark.a": "1 2",
        "spark.b": "3",
        "spark.c": "x=y",
        "spark.ssl.keyPassword": "hidden",
    }
    assert spark_settings(None, None) == {}


@pytest.mark.parametrize(
    ("conf", "text", "said"),
    [
        (["spark.a"], "", r"--conf 'spark.a': write it as spark.NAME=VALUE"),
        (["a=b"], "", "begin with 'spark.'"),
        (["spark.ssl.keyPassword=x"], "", "put it into a --properties-file"),
        ([], "spark.a 1\nother 2", "line 2: the names"),
        ([], "spark.a", "line 1: write it"),
    ],
)
def test_properties_that_cannot_be_are_named(
    tmp_path: Path, conf: list[str], text: str, said: str
) -> None:
    file = tmp_path / "conf"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        spark_settings(conf, file)
    assert "=x" not in str(caught.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="--properties-file /nowhere: cannot read it"):
        spark_settings(None, Path("/nowhere"))


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the one session that a command opened."""
    found: list[str] = []

    @contextmanager
    def view_tables(*_: object, **__: object) -> Iterator[object]:
        found.append("opened")
        yield SimpleNamespace(sparkContext=SimpleNamespace(cancelAllJobs=None))

    def answer(tables: object, statement: str, limit: int, *, as_json: bool) -> None:
        found.append(statement)
        if "wrong" in statement:
            raise ConfigError("SQL: it is wrong")

    monkeypatch.setattr(jobs, "view_tables", view_tables)
    monkeypatch.setattr("kafkamq.spark.jobs.sql.Tables", lambda *_: None)
    monkeypatch.setattr(jobs, "_answer", answer)
    return found


@pytest.mark.parametrize(
    ("stdin", "expected", "code"),
    [
        ("SELECT ';';\n;\nSELECT\n 2;\n SELECT 3\n", ["SELECT ';'", "SELECT\n 2", "SELECT 3"], 0),
        ("SELECT wrong;\nSELECT 2; \n", ["SELECT wrong", "SELECT 2"], 1),
        ("", [], 0),
    ],
)
def test_one_session_answers_all_statements_of_stdin(
    answered: list[str], stdin: str, expected: list[str], code: int
) -> None:
    done = CliRunner().invoke(app, ["sql", "-b", "x:1"], input=stdin)
    assert done.exit_code == code
    assert answered == ["opened", *expected]


def test_a_prompt_goes_on_behind_an_error_until_it_is_left(
    answered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["SELECT wrong;", "SELECT", "2;", "exit;", "SELECT 3;"])
    prompts: list[str] = []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        return next(lines)

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(jobs.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    # The tables are not asked.
    failed = jobs._converse(None, 10, as_json=False, cancel=lambda: None)  # type: ignore[arg-type]
    assert failed is False
    assert answered == ["SELECT wrong", "SELECT\n2"]
    assert prompts == ["sql> ", "sql> ", "... ", "sql> "]
