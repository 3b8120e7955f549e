"""A hook of MkDocs: the pages that lie outside of docs/, and Markdown as the repository has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "examples/README.md": "examples/index.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what lies outside of docs/, under the names that the links then have."""
    from mkdocs.structure.files import File

    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=relinked(text)))
    for path in sorted((ROOT / "examples").glob("*.py")):
        name = f"examples/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    pages = {file.src_uri for file in files.documentation_pages()}
    if unnamed := sorted(pages - named(config.nav)):
        config.nav.append({"More": unnamed})
    return files


def named(nav: object) -> set[str]:
    """The pages that a navigation names, at any depth."""
    if isinstance(nav, str):
        return {nav}
    parts = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
    return {page for part in parts for page in named(part)}


def relinked(text: str) -> str:
    """Links of a page outside of docs/, as seen from inside."""
    text = re.sub(r"\]\((\.\./)?docs/", r"](\1", text)
    return text.replace("](examples/README.md", "](examples/index.md")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """What GitHub understands and Python-Markdown does not."""
    del page, config, files
    return plain(markdown)


def plain(markdown: str) -> str:
    """Fences of one word, an empty line before a list, four columns before what an item holds."""
    lines: list[str] = []
    fence = ""
    is_list = False
    for line in markdown.split("\n"):
        if fence:
            fence = "" if line.strip() == fence else fence
        else:
            if opened := re.match(r" *(```+)", line):
                fence = opened[1]
                line = re.sub(r"(```\w+) run$", r"\1", line)
            if is_item(line) and lines and (not is_list or lines[-1].endswith("```")):
                lines.append("")
            if line and not line.startswith(" "):
                is_list = is_item(line)
        lines.append(f"  {line}" if is_list and line.startswith("  ") else line)
    return "\n".join(lines)


def is_item(line: str) -> bool:
    """Whether a line begins an item of an outermost list."""
    return re.match(r"(-|\*|\d+\.) ", line) is not None
