"""What the check of privates takes for one, and that its list can only shrink."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.check_privates import compare, findings, parse_list, shrunk

PRODUCT = """
_LIMIT = 3
class Reader:
    def __init__(self):
        self._position = 0
    def _poll(self): ...
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reader._position", ["_position"]),
        ("parts.reader._poll()", ["_poll"]),
        ("from kafkamq.reader import _LIMIT", ["_LIMIT"]),
        ("monkeypatch.setattr(module, '_LIMIT', 1)", ["_LIMIT"]),
        ("monkeypatch.setattr('kafkamq.reader._LIMIT', 1)", ["_LIMIT"]),
        ("getattr(reader, '_poll')()", ["_poll"]),
        ("os._exit(1)", []),  # not the product's
        ("KafkaError._TIMED_OUT", []),
        ("class Fake:\n    def _poll(self): ...\nFake()._poll()", []),  # the test's own
        ("class Fake(Reader):\n    def go(self):\n        self._poll()", []),
        ("reader.__dict__", []),
    ],
)
def test_what_is_a_private_of_the_product(tmp_path: Path, text: str, expected: list[str]) -> None:
    for name, content in (("src/kafkamq/reader.py", PRODUCT), ("tests/unit/test_it.py", text)):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(content)
    found = findings(tmp_path).get("tests/unit/test_it.py", [])
    assert [name for _, name in found] == expected


def test_the_list_can_only_shrink() -> None:
    text = "# Left.\ntests/a.py: _one _two\ntests/b.py: _one\n"
    found = {"tests/a.py": [(3, "_two"), (4, "_three")]}
    fresh, gone = compare(found, parse_list(text))
    assert fresh == ["tests/a.py:4: reaches the private _three"]
    assert gone == {"tests/a.py": {"_one"}, "tests/b.py": {"_one"}}
    assert shrunk(text, gone) == "# Left.\ntests/a.py: _two\n"
