"""Handlers of queues and the worker that runs them; public as ``kafkamq.Worker``."""

from kafkamq.kafka.handlers.bodies import BodyError
from kafkamq.kafka.handlers.calls import Middleware
from kafkamq.kafka.handlers.processes import PlainMessage
from kafkamq.kafka.handlers.spec import HandlerSpec
from kafkamq.kafka.handlers.telemetry import trace_headers
from kafkamq.kafka.handlers.worker import Worker

__all__ = ["BodyError", "HandlerSpec", "Middleware", "PlainMessage", "Worker", "trace_headers"]
