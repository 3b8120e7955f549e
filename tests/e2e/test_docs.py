"""What the documents show, runs.

A fenced block whose language is followed by ``run`` is a whole program: ``python run`` brings its
own broker if it needs one, ``bash run`` finds one in ``KAFKAMQ_BOOTSTRAP_SERVERS``.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import within

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MORE = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
_BLOCK = re.compile(r"^```(\w+) run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#]+?)(#[^)]*)?\)")
TIMEOUT_S = 120
# Each of these starts a broker or Spark for itself, which takes longer than all that it shows.
LONG = {"any-topic", "claims", "compare", "jobs", "operations", "parallel", "sink", "spark"}


def blocks(language: str) -> list[object]:
    """All blocks of a language that are to run, named by document and number."""
    found = []
    for document in DOCUMENTS:
        kinds = _BLOCK.findall(document.read_text(encoding="utf-8"))
        own = [text for kind, text in kinds if kind == language]
        marks = [pytest.mark.faults] if document.stem in LONG else []
        found += [
            pytest.param(text, id=f"{document.stem}-{number}", marks=marks)
            for number, text in enumerate(own, start=1)
        ]
    return found


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within(TIMEOUT_S),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("program", blocks("python"))
def test_python(program: str, bootstrap: str) -> None:
    del bootstrap  # so that the jars are fetched
    run([sys.executable, "-c", program])


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("script", blocks("bash"))
def test_bash(script: str, bootstrap: str, tmp_path: Path) -> None:
    program = tmp_path / "kafkamq"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kafkamq.cli "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    run(["bash", "-eu", "-c", script], PATH=path, KAFKAMQ_BOOTSTRAP_SERVERS=bootstrap)


def test_every_document_shows_something_that_runs() -> None:
    runnable = {
        document.name
        for document in DOCUMENTS
        if _BLOCK.search(document.read_text(encoding="utf-8"))
    }
    assert runnable == {document.name for document in DOCUMENTS}


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, *MORE], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in _LINK.findall(document.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        linked = document.parent / target
        assert linked.exists(), target
        if anchor:
            assert anchor[1:] in anchors(linked), anchor


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as they are made for Markdown."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_site_names_documents_that_there_are() -> None:
    pages = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    documents = {document.name for document in DOCUMENTS}
    others = {"index.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/index.md"}
    assert len(set(pages)) == len(pages) > 10
    assert set(pages) - documents == others
