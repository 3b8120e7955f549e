"""The fold inside Spark: one stateful key per marker partition, running ``folding.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import (
    StatefulProcessor,
    StatefulProcessorHandle,
)

from kafkamq.spark.daemon import calm_worker
from kafkamq.spark.tracker.folding import FOLDED_COLUMNS, FoldSettings, PartitionFold

if TYPE_CHECKING:
    import pandas as pd


class FoldProcessor(StatefulProcessor):
    """Folds the batches of one marker partition and says what is due."""

    def __init__(self, settings: FoldSettings) -> None:
        self._settings = settings

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        calm_worker()
        index = handle.getValueState(
            "index", "index BINARY, epoch BIGINT, redelivered BIGINT, dead_lettered BIGINT"
        )
        chunks = handle.getMapState("chunks", "name STRING", "chunk BINARY")
        self._fold = PartitionFold(self._settings, index, chunks)

    def handleInputRows(  # type: ignore[override]  # noqa: N802 - rows come as pandas here
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Fold a batch: rows of mode ``blocks``, all of one marker partition."""
        import pandas as pd

        cells = sorted(
            (
                row
                for frame in rows
                for row in frame[list(_CELL)].itertuples(index=False, name=None)
            ),
            key=lambda row: row[4],
        )
        yield pd.DataFrame([self._fold.fold(cells)], columns=_OUTPUT)

    def close(self) -> None:
        """Nothing is held open."""


_CELL = ("topic", "partition", "range_start", "range_end", "first_offset", "block")
_OUTPUT = [column.split()[0] for column in FOLDED_COLUMNS.split(", ")]
