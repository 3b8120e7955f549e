"""Writes orders into Postgres, a hundred at a time, each once however often it is delivered.

    python examples/postgres_inbox.py localhost:9092 "host=localhost dbname=shop" [namespace]

A message may be delivered again: its worker died after the commit and before the ack. So the ids
of the messages go into a table of their own, the inbox, in the transaction that writes the rows.
What the inbox has already is acknowledged, and not written a second time. Two workers that hold
copies of one message at once are safe, too: the second insert waits for the first transaction. The
id is the sender's (``send(..., id=...)``), or one that the producer made up for the message.
Records of other programs have none: take one of their own fields in its place.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import psycopg

from kafkamq import Message, Service, Worker

TABLES = """
CREATE TABLE IF NOT EXISTS inbox (
    message_id text PRIMARY KEY,
    received_at timestamptz NOT NULL DEFAULT now()  -- for a job that deletes what is old
);
CREATE TABLE IF NOT EXISTS orders (id bigint NOT NULL, amount bigint NOT NULL);
"""
NEW_IDS = """
INSERT INTO inbox (message_id) SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING
RETURNING message_id
"""


@dataclass
class Order:
    """What a message holds, as JSON; anything else goes to the dead letters."""

    id: int
    amount: int = 1


def main() -> None:
    """Works until it is asked to stop."""
    bootstrap, database = sys.argv[1:3]
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(TABLES)

    def store(orders: list[Order], messages: list[Message]) -> None:
        """Writes those orders that the inbox does not have; an exception gives all of them back."""
        by_id = dict(zip((message.id for message in messages), orders, strict=True))
        with psycopg.connect(database) as connection:  # commits at its end, or rolls back
            new = connection.execute(NEW_IDS, [sorted(by_id)]).fetchall()
            rows = [(by_id[id].id, by_id[id].amount) for (id,) in new]
            connection.cursor().executemany("INSERT INTO orders VALUES (%s, %s)", rows)
        print(f"{len(new)} new orders in {len(messages)} messages", flush=True)

    with Service(bootstrap, *sys.argv[3:4]) as service:
        service.queue("orders").handler(batch_size=100, batch_linger=0.1)(store)
        Worker(service).run()


if __name__ == "__main__":
    main()
