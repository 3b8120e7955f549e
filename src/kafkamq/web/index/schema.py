"""The database of the index: one SQLite file, which may be deleted at any time.

A ``place`` is what ``web/index/rows.py`` says; times are the brokers', in ms; ids and keys are
bytes.

- ``pack``: records of the messages topic, or SCHEDULEs, of one chunk, as ``packs.py`` packs them.
- ``copy``: a record that is not the first of its message. ``attempt`` is its delivery count;
  ``origin`` the place of its first copy, ``letter`` the dead letter that it was redriven from.
- ``event``: what markers say of messages of one chunk, packed, too.
- ``chunk``: which of its messages were STARTed, one bit each; how many were not.
- ``letter``: a dead letter; ``letter_group`` counts those of one queue, reason and form of error.
- ``minute``: what happened to a queue in a minute; ``timed`` messages got their worker's verdict,
  ``held_ms`` after their first STARTs, taken together.
- ``name``: queue ids, consumers, reasons and forms of errors, each written once.
"""

from __future__ import annotations

import fcntl
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import IO

from kafkamq.errors import ConfigError

VERSION = "3"
CACHE_KIB = 32 * 1024
SUFFIXES = ("", "-wal", "-shm")

_SCHEMA = """
CREATE TABLE meta (field TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE position (topic TEXT, number INTEGER, next INTEGER, restart INTEGER,
    PRIMARY KEY (topic, number)) WITHOUT ROWID;
CREATE TABLE name (number INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE queue (queue INTEGER PRIMARY KEY, messages INTEGER NOT NULL,
    waiting INTEGER NOT NULL, letters INTEGER NOT NULL, redriven INTEGER NOT NULL);
CREATE TABLE pack (place INTEGER PRIMARY KEY, messages INTEGER, last_ms INTEGER, bits BLOB,
    queues BLOB, times BLOB, ids BLOB, keys BLOB, headers BLOB);
CREATE TABLE copy (place INTEGER PRIMARY KEY, attempt INTEGER, origin INTEGER, letter INTEGER);
CREATE TABLE event (number INTEGER PRIMARY KEY, chunk INTEGER, events BLOB);
CREATE INDEX event_chunk ON event (chunk);
CREATE TABLE chunk (chunk INTEGER PRIMARY KEY, started BLOB, waiting INTEGER, last_ms INTEGER);
CREATE INDEX chunk_waiting ON chunk (chunk) WHERE waiting > 0;
CREATE TABLE letter (number INTEGER PRIMARY KEY, place INTEGER UNIQUE, queue INTEGER,
    at_ms INTEGER, id BLOB, key BLOB, reason INTEGER, form INTEGER, error TEXT, attempt INTEGER,
    origin INTEGER, headers BLOB);
CREATE TABLE letter_group (queue INTEGER, reason INTEGER, form INTEGER, letters INTEGER NOT NULL,
    redriven INTEGER NOT NULL, first_ms INTEGER, last_ms INTEGER,
    PRIMARY KEY (queue, reason, form)) WITHOUT ROWID;
CREATE TABLE redriven (place INTEGER PRIMARY KEY, at_ms INTEGER);
CREATE TABLE minute (minute INTEGER, queue INTEGER, sent INTEGER NOT NULL, started INTEGER NOT NULL,
    acked INTEGER NOT NULL, failed INTEGER NOT NULL, dead INTEGER NOT NULL,
    timed INTEGER NOT NULL, held_ms INTEGER NOT NULL, PRIMARY KEY (minute, queue)) WITHOUT ROWID;
"""

_INDEXES = """
CREATE INDEX IF NOT EXISTS copy_origin ON copy (origin) WHERE origin IS NOT NULL;
CREATE INDEX IF NOT EXISTS copy_letter ON copy (letter) WHERE letter IS NOT NULL;
CREATE INDEX IF NOT EXISTS letter_queue ON letter (queue);
CREATE INDEX IF NOT EXISTS letter_form ON letter (form);
CREATE INDEX IF NOT EXISTS letter_id ON letter (substr(id, -5));
CREATE INDEX IF NOT EXISTS letter_key ON letter (substr(key, -5)) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS letter_origin ON letter (origin) WHERE origin IS NOT NULL;
"""


def lock_index(path: Path) -> IO[bytes]:
    """Keep others from writing this index until the file that is returned is closed.

    Raises:
        ConfigError: Another one writes it, or the file beside it cannot be made.
    """
    try:
        file = Path(f"{path}.lock").open("wb")  # noqa: SIM115 - it is who calls that closes it
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"{path}: other pages of this namespace use this index; name another file by --index"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: no index ({error}); name another file by --index") from None
    return file


def open_index(path: Path, identity: str) -> sqlite3.Connection:
    """Open the database for writing; what is damaged or of something else is made again.

    ``identity``: Of what it is the index: cluster, namespace and ids of its topics.
    """
    try:
        connection = _connect(path)
        if _is_of(connection, identity):
            return connection
        connection.close()
    except sqlite3.DatabaseError:
        pass
    delete_index(path)
    connection = _connect(path)
    with connection:
        connection.executescript(_SCHEMA)
        connection.executemany(
            "INSERT INTO meta VALUES (?, ?)", [("version", VERSION), ("identity", identity)]
        )
    return connection


def make_indexes(connection: sqlite3.Connection) -> None:
    """Make what finds rows, if it is not there: at once costs half of what each row would cost."""
    with connection:
        connection.executescript(_INDEXES)


def open_reader(path: Path) -> sqlite3.Connection:
    """Open it for reading, for one thread at a time."""
    uri = f"file:{str(path).replace('%', '%25').replace('?', '%3f').replace('#', '%23')}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, check_same_thread=False, timeout=5.0)
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    connection.execute("PRAGMA query_only = 1")
    return connection


def delete_index(path: Path) -> None:
    for suffix in SUFFIXES:
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def size_bytes(path: Path) -> int:
    total = 0
    for suffix in SUFFIXES:
        with suppress(FileNotFoundError):
            total += Path(f"{path}{suffix}").stat().st_size
    return total


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=5.0)
    # Ids, keys and headers of messages are in it.
    path.chmod(0o600)
    connection.execute("PRAGMA journal_mode = WAL")
    # A database that a power cut damages is made again.
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute(f"PRAGMA cache_size = -{2 * CACHE_KIB}")
    connection.execute("PRAGMA wal_autocheckpoint = 4000")
    return connection


def _is_of(connection: sqlite3.Connection, identity: str) -> bool:
    found = connection.execute("SELECT name FROM sqlite_master WHERE name = 'meta'").fetchone()
    if found is None:
        return False
    kept = dict(connection.execute("SELECT field, value FROM meta"))
    if kept != {"version": VERSION, "identity": identity}:
        return False
    return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
