"""What Python runs first in each process that Spark starts beside our driver.

It takes PySpark from its folder, compiled, not from the archive that Spark puts first: from there
each process compiles it again, most of a second of CPU. A start of the tracker has five of them.
"""

import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path


def _prefer_folders() -> None:
    for package, archive in (("pyspark", "pyspark.zip"), ("py4j", "py4j-*-src.zip")):
        others = [entry for entry in sys.path if not Path(entry).match(archive)]
        found = PathFinder.find_spec(package, others)
        home = Path(found.origin).parent.parent if found and found.origin else None
        removed = set(sys.path) - set(others)
        if home is not None and all(home in Path(entry).parents for entry in removed):
            sys.path[:] = others


_prefer_folders()
# Then the one that would have run without this one, as Debian has it.
sys.path[:] = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]
_this = sys.modules.pop("sitecustomize", None)
with suppress(ImportError):
    import_module("sitecustomize")
if _this is not None:
    sys.modules.setdefault("sitecustomize", _this)
