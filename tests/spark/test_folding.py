"""Folds that are kept between the batches of streams of `deliveries`; a broker, but no Spark."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.integration.tracker_logs import Logs
from tests.waiting import within

from kafkamq.errors import DataLossError
from kafkamq.markers.rules.attempts import Attempt
from kafkamq.spark.source.folding import FoldedLog
from kafkamq.transport.log_reader import LogRange, log_reader
from kafkamq.types import Marker, MarkerType, MessageId

pytestmark = pytest.mark.spark

MESSAGES = 40  # a START at each even offset, its END behind it
END = 2 * MESSAGES


@pytest.fixture
def logs(bootstrap: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Logs:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Logs(bootstrap, namespace, partitions=1, marker_partitions=1)
    for offset in range(MESSAGES):
        one = MessageId(0, offset)
        made.start(one, timeout_ms=60_000)
        made.end(one)
    return made


def batch(logs: Logs, start: int, end: int, query: str = "q", *, begin: int = 0) -> FoldedLog:
    """A batch of a stream; the rows are what the range says."""
    wanted = LogRange(logs.config.marker_topic, 0, start, end)
    log = FoldedLog(logs.config, wanted, begin=begin, topic_id="ab", query=query)
    found: list[Attempt] = [each for some in log.ended() for each in some]
    ends = {offset for offset in range(start, end) if offset % 2}
    assert {each.end_offset for each in found} == ends
    log.keep()
    return log


def folded_from(logs: Logs, start: int, query: str = "q") -> int:
    """Where the next batch would go on reading."""
    wanted = LogRange(logs.config.marker_topic, 0, start, END)
    log = FoldedLog(logs.config, wanted, begin=0, topic_id="ab", query=query)
    return log.attempts.tracker.next_offset


def test_streams_do_not_touch_each_others_folds(logs: Logs) -> None:
    batch(logs, 0, 61, "ahead")
    batch(logs, 0, 21, "behind")
    batch(logs, 61, 71, "ahead")
    assert folded_from(logs, 21, "behind") == 21
    batch(logs, 21, 31, "behind")
    assert folded_from(logs, 71, "ahead") == 71
    assert folded_from(logs, 61, "ahead") == 61, "of a batch that is repeated"


def test_a_batch_does_not_write_again_what_is_open(logs: Logs, tmp_path: Path) -> None:
    batch(logs, 0, 11)
    kept = [(path, path.read_bytes()) for path in tmp_path.glob("*/*.json")]
    for start in range(11, 51, 10):
        batch(logs, start, start + 10)
    assert [(path, path.read_bytes()) for path in tmp_path.glob("*/*.json")] == kept
    assert folded_from(logs, 51) == 51
    assert folded_from(logs, 51) == 11, "in another process, which reads what has come since"


def test_executors_in_turns_go_on_from_their_last_batch(
    logs: Logs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    for number, start in enumerate(range(1, 61, 10)):
        monkeypatch.setattr(tempfile, "tempdir", str(folders[number % 2]))
        assert start < 20 or folded_from(logs, start) == start - 10
        batch(logs, start, start + 10)
        kept = list(folders[number % 2].glob("*/*.json"))
        assert len(kept) <= 2


def test_what_retention_has_deleted_before_the_position_ends_no_stream(logs: Logs) -> None:
    """Nothing is kept: a new executor, or the temporary folder was cleaned."""
    topic = logs.config.marker_topic
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    place = TopicPartition(topic, 0, 20)
    admin.delete_records([place])[place].result(within(30))
    assert log_reader(logs.config).log_starts(topic, [0]) == {0: 20}
    batch(logs, 41, 61)
    assert folded_from(logs, 61) == 61
    with pytest.raises(DataLossError):
        batch(logs, 11, 31, "behind the log")


def test_a_folder_that_cannot_be_made_only_costs_time(
    logs: Logs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(file))
    batch(logs, 11, 31)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link to another user")
def test_a_link_of_another_user_is_not_followed(logs: Logs, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / f"kafkamq-folds-{os.getuid()}"
    target.mkdir()
    link.symlink_to(target)
    os.lchown(link, 65_534, 65_534)
    batch(logs, 0, 21)
    assert not list(target.iterdir())


def test_folds_that_nobody_uses_are_deleted(logs: Logs, tmp_path: Path) -> None:
    batch(logs, 0, 11, "ended long ago")
    (left,) = tmp_path.glob("*/*.json")
    os.utime(left, (0, 0))
    batch(logs, 0, 11, "alive")
    assert folded_from(logs, 11, "alive") == 11
    assert not left.exists()


def test_attempts_of_batches_are_those_of_their_messages(bootstrap: str, namespace: str) -> None:
    """A whole chunk as a bitmap, overlaps, single markers; and never all rows in memory at once."""
    logs = Logs(bootstrap, namespace, partitions=1, marker_partitions=1)
    ids = [MessageId(0, offset, b"t" * 16, 1) for offset in range(6 * 4096)]
    ended = Marker(MarkerType.END, consumer_id="worker")
    for first in range(0, len(ids), 4096):
        chunk = ids[first : first + 4096]
        logs.start_batch(*chunk[::2], timeout_ms=60_000)
        logs.start(chunk[1], timeout_ms=60_000)
        logs.start_batch(*chunk, timeout_ms=60_000)  # once more, or for the first time
        logs.end(chunk[0])
        logs.batch(*chunk[:-1], marker=ended)
    wanted = LogRange(logs.config.marker_topic, 0, 0, len(logs.markers()))
    log = FoldedLog(logs.config, wanted, begin=0, topic_id="")
    found = list(log.ended())
    assert max(map(len, found)) < 3 * 4096 + 1
    attempts = [each for some in found for each in some]
    assert sorted(each.message_id.offset for each in attempts) == [
        one.offset for one in ids if one.offset % 4096 != 4095
    ]
    starts = {each.message_id.offset: each.starts for each in attempts}
    assert [starts[4096 + offset] for offset in range(4)] == [2, 2, 2, 1]
    left = [each.attempt.message_id.offset for each in log.attempts.open()]
    assert sorted(left) == list(range(4095, 6 * 4096, 4096))
