"""Questions of a consumer that know nothing but a timeout: asked in slices, so that errors show.

librdkafka tells wrong credentials to the error callback alone, which ``poll`` serves; a question
that blocks meanwhile would wait for all of its time, and then say that nobody answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import KafkaException

from kafkamq.transport.errors import UNANSWERED, ErrorWatch, meaning
from kafkamq.transport.port import Consumer

__all__ = ["ask_in_slices"]

_FIRST_S = 1.0  # each slice is twice as long as the last: slow answers are waited for, too

Answer = TypeVar("Answer")


def ask_in_slices(
    ask: Callable[[float], Answer],
    consumer: Consumer,
    watch: ErrorWatch,
    doing: str,
    timeout_s: float,
) -> Answer:
    """Ask again until there is an answer, or the time is over.

    Args:
        ask: The question; gets the seconds that it may take.
        consumer: Whom it asks; one that reads nothing, as it is polled.
        watch: Its error callback.
        doing: For error texts.
        timeout_s: Of all slices together.

    Raises:
        BrokerError: Credentials are refused.
        KafkaException: The question failed, or was not answered in time.
    """
    deadline_s = time.monotonic() + timeout_s
    slice_s = _FIRST_S
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            return ask(max(0.1, min(slice_s, left_s)))
        except KafkaException as error:
            consumer.poll(0)
            watch.check(doing)
            if left_s <= slice_s or meaning(error) not in UNANSWERED:
                raise
        slice_s *= 2
