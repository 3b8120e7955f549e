"""Mutants of R22-R26: one engine, topics that can be used, status, foreign clients, partitions."""

from __future__ import annotations

from tests.mutant_lists.mutant import Mutant

LEDGER = "markers/tracker/ledger.py"
TOPICS = "queue/topics.py"
ENGINES = ("tests/integration/test_local_tracker_engines.py",)
LEDGERS = ("tests/unit/test_ledger_clients.py",)
SETTINGS = ("tests/unit/test_clients_topics.py",)

OF_STARTS = [
    Mutant(
        "R22",
        "a batch that is repeated is written from its beginning",
        LEDGER,
        "return last.rows_done if last is not None and last.batch == batch else 0",
        "return 0",
        ENGINES,
    ),
    Mutant(
        "R22",
        "a start takes the epoch of the one before it",
        LEDGER,
        "return 1 if newest is None else newest.epoch + 1",
        "return 1 if newest is None else newest.epoch",
        ENGINES,
    ),
    Mutant(
        "R22",
        "an epoch is chosen by partition 0 alone, though its ledger is lost",
        LEDGER,
        "if (first is not None and first.epoch) or len(keys) == 1:",
        "if True:",
        LEDGERS,
    ),
    Mutant(
        "R22",
        "a ledger is used before it was read again",
        LEDGER,
        "return self._is_read and self.producer.is_ready",
        "return self.producer.is_ready",
        LEDGERS,
    ),
    Mutant(
        "R17",
        "a ledger that rested is used behind what another replica has written",
        LEDGER,
        "if last != held:",
        "if False:",
        LEDGERS,
    ),
    Mutant(
        "R23",
        "a topic whose clients set the time is taken",
        TOPICS,
        'if kind != "LogAppendTime":',
        "if False:",
        SETTINGS,
    ),
    Mutant(
        "R23",
        "markers may vanish while their message is held",
        TOPICS,
        "if 0 <= retention_ms < 2 * max_lease_ms:",
        "if 0 <= retention_ms < max_lease_ms:",
        SETTINGS,
    ),
    Mutant(
        "R24",
        "the status says that nothing is waited for",
        "markers/tracker/partition.py",
        "deadline_ms=wake.deadline_ms,",
        "deadline_ms=-1,",
        ("tests/integration/test_metrics.py",),
    ),
    Mutant(
        "R25",
        "markers are written beside kafka-mq-go's tracker",
        TOPICS,
        "if any(not topics or config.marker_topic in topics for topics in members):",
        "if False:",
        ("tests/integration/test_topics.py",),
    ),
    Mutant(
        "R26",
        "each offset has a marker partition of its own",
        "queue/wire/partitions.py",
        "return _chunk_partition(partition, offset // CHUNK_OFFSETS, count)",
        "return _chunk_partition(partition, offset, count)",
        ("tests/wire/test_keys.py", "tests/wire/test_partitioner.py"),
    ),
]
