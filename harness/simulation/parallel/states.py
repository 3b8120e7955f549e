"""States of parallel consumers that the seeds must reach, each at least once."""

from __future__ import annotations

_LINES = {
    "parallel: a record is tried again": "a record failed and is tried again",
    "parallel: a dead letter": "a record is given up; it is a dead letter",
    "parallel: a dead letter was refused at first": "%s was refused; it is tried again",
    "parallel: skipped": "a record is given up and skipped",
    "parallel: a commit is made again": "a commit failed and is made again",
    "parallel: no answer to the last commit": "a last commit has no answer",
    "parallel: the last commit failed": "the last commit failed",
    "parallel: no answer to a commit of what goes": "no answer to the commit of revoked partitions",
    "parallel: maps are refused": "the broker takes shorter commit metadata",
    "parallel: revoked": "partitions were revoked",
    "parallel: lost": "partitions were lost",
    "parallel: records were lost and are skipped": "records were lost and are skipped",
    "parallel: where to read is not known yet": "where to read is not known yet",
    "parallel: a transaction is aborted": "a transaction is aborted",
    "parallel: a record stalls": "a record holds the committed offset back",
}
_OF_LEDGERS = (
    "a commit with a map",
    "a partition went with a handler at work",
    "a log was truncated under its readers",
    "a log's start went before its records were read",
    "a restart with a map",
)
PARALLEL_STATES = frozenset([*_LINES, *_OF_LEDGERS])


def of_parallel_line(message: str) -> list[str]:
    """The states that a line of log tells of."""
    return [state for state, begin in _LINES.items() if message.startswith(begin)]
