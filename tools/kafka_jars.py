"""Prints the list of jars of a Kafka version, to be committed after a look at it."""

from __future__ import annotations

import os
import sys

from kafkamq.dev.artifacts import fetch_kafka, format_list
from kafkamq.dev.environment import cache_dir_from, java_from
from kafkamq.errors import KafkaMQError


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: python tools/kafka_jars.py VERSION\n")
        return 2
    cache, java = cache_dir_from(os.environ), java_from(os.environ)
    try:
        jars = fetch_kafka(arguments[0], cache_dir=cache, java=java)
    except KafkaMQError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(format_list(jars.version, jars.modules))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
