"""What the base class of consumers does for all backends."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from kafkamq import Consumer, Message
from kafkamq.queue.topic_consumer import TopicConsumer
from kafkamq.testing import Clock, MemoryService


def test_an_iteration_that_is_interrupted_gives_its_message_back() -> None:
    """Between the end of the receive and its own return, where nobody has seen the message yet."""
    with MemoryService(clock=Clock()) as service:
        queue = service.queue("q", backend="offsets")
        queue.producer().send(b"x")
        with queue.consumer() as consumer:
            assert isinstance(consumer, TopicConsumer)

            def trace(frame: FrameType, event: str, _: Any) -> Any:
                is_next = frame.f_code is Consumer._next.__code__
                if is_next and event == "line" and frame.f_locals.get("message") is not None:
                    sys.settrace(None)
                    raise KeyboardInterrupt
                return trace

            sys.settrace(trace)
            try:
                with pytest.raises(KeyboardInterrupt):
                    next(iter(consumer))
            finally:
                sys.settrace(None)
            message = consumer.receive(0.0)
            assert isinstance(message, Message)
            assert (message.payload, message.delivery_count) == (b"x", 1)
            message.ack()
