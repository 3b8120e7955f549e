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
from kafkamq.cli.spark.sql_check import TABLES, check_condition, check_statement, split_statements
from kafkamq.errors import ConfigError
from kafkamq.spark.views import VIEWS


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("", "is empty"),
        ("-- nothing", "is empty"),
        (
            "SELCT 1",
            r"cannot begin with 'SELCT' \(line 1, column 1\): did you mean SELECT\? Tables are m",
        ),
        ("SELECT 'a FROM messages", r"the quote ' does not close \(line 1, column 8\)"),
        ("SELECT (1", r"\) is missing for the one \(line 1, column 8\)"),
        ("SELECT 1)", r"\) closes nothing"),
        ("SELECT id\nFROM delivries", "no table delivries: did you mean deliveries"),
        ("SELECT * FROM messages m JOIN nothing USING (id)", "no table nothing. Tables are"),
        ("SELECT (SELECT max(id) FROM `mesages`)", "did you mean messages"),
        ("WITH a AS (SELECT 1) SELECT * FROM b", "no table b"),
    ],
)
def test_a_statement_that_cannot_be_right_is_refused(statement: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^SQL: .*{said}"):
        check_statement(statement, option="SQL")


@pytest.mark.parametrize(
    "statement",
    [
        "select 1",
        "(SELECT 1) UNION ALL (SELECT 2)",
        "SELECT * FROM deliveries -- it's a comment (",
        "SELECT extract(YEAR FROM started_at), trim(BOTH 'x' FROM id) FROM deliveries",
        "SELECT a IS NOT DISTINCT FROM b FROM VALUES (1, 2) AS t(a, b)",
        "WITH a (x) AS (SELECT 1), b AS (SELECT x FROM a) SELECT * FROM b JOIN a USING (x)",
        "SELECT * FROM range(10)",
        "SELECT * FROM some.catalog.tbl JOIN Dead_Letters ON true",
        "SELECT id, 'it''s', \"a\\\"b\", `c)` FROM in_flight, LATERAL explode(headers)",
        "FROM markers |> SELECT type",
        "DESCRIBE nothing",
        "SHOW TABLES",
        "SELECT * FROM (SELECT 1)",
    ],
)
def test_what_may_be_right_is_spark_s_to_judge(statement: str) -> None:
    check_statement(statement, option="SQL")


def test_a_condition_is_looked_at_as_well() -> None:
    check_condition("id IN (SELECT id FROM deliveries WHERE outcome = 'ACK')", option="--where")
    with pytest.raises(ConfigError, match=r"^--where: there is no table delivery"):
        check_condition("id IN (SELECT id FROM delivery)", option="--where")
    with pytest.raises(ConfigError, match="is empty"):
        check_condition(" ", option="--where")


def test_its_tables_are_those_of_spark() -> None:
    assert TABLES == VIEWS


def test_statements_end_with_semicolons_outside_of_quotes() -> None:
    found = split_statements("SELECT ';' -- ;\n; ;SELECT 2;\nSELECT")
    assert found == (["SELECT ';' -- ;", "SELECT 2"], "\nSELECT")


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
        yield None

    def answer(tables: object, statement: str, limit: int, *, as_json: bool) -> None:
        found.append(statement)
        if "wrong" in statement:
            raise ConfigError("SQL: it is wrong")

    monkeypatch.setattr(jobs, "view_tables", view_tables)
    monkeypatch.setattr(jobs, "_answer", answer)
    return found


@pytest.mark.parametrize(
    ("stdin", "expected", "code"),
    [
        ("SELECT 1;\nSELECT\n 2; SELECT 3\n", ["SELECT 1", "SELECT\n 2", "SELECT 3"], 0),
        ("SELECT wrong;SELECT 2;\n", ["SELECT wrong", "SELECT 2"], 1),
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
    assert jobs._converse(None, 10, as_json=False) is False  # type: ignore[arg-type]  # not asked
    assert answered == ["SELECT wrong", "SELECT\n2"]
    assert prompts == ["sql> ", "sql> ", "... ", "sql> "]


def test_a_wrong_statement_opens_no_session(answered: list[str]) -> None:
    failed = CliRunner().invoke(app, ["sql", "-b", "x:1", "SELECT 1 FROM mesages"]).exception
    assert isinstance(failed, ConfigError)
    for command in ("replay", "dlq redrive"):
        arguments = [*command.split(), "-b", "x:1", "--where", "(id = 'x'"]
        assert isinstance(CliRunner().invoke(app, arguments).exception, ConfigError)
    assert answered == []
