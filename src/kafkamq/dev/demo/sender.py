"""Sends the demo's messages at a steady rate, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kafkamq.config import ServiceConfig
from kafkamq.dev.demo.plan import Planned
from kafkamq.queue.producer import Delivery, Producer
from kafkamq.queue.service import Service

BATCHES_PER_S = 10
TIMEOUT_S = 120.0


class Sender:
    def __init__(self, config: ServiceConfig, planned: Sequence[Planned], *, per_s: int) -> None:
        self._config = config
        self._planned = planned
        self._batch = max(1, per_s // BATCHES_PER_S)
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="demo-sender", daemon=True)
        self.confirmed = 0
        self.is_done = False

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        config = self._config
        try:
            with Service(config.bootstrap_servers, config.namespace, kafka=config.kafka) as service:
                queues = {item.queue_id for item in self._planned}
                self._send({queue: service.queue(queue).producer() for queue in queues})
        except BaseException as error:  # noqa: BLE001  raised where the demo looks next
            self._error = error

    def _send(self, producers: dict[str, Producer]) -> None:
        deliveries: list[Delivery] = []
        next_at = time.monotonic()
        for start in range(0, len(self._planned), self._batch):
            if self._stopping.wait(max(0.0, next_at - time.monotonic())):
                return
            next_at += 1 / BATCHES_PER_S
            batch = self._planned[start : start + self._batch]
            for queue_id, producer in producers.items():
                deliveries += producer.send_many(
                    [item.message for item in batch if item.queue_id == queue_id]
                )
        for delivery in deliveries:
            delivery.result(TIMEOUT_S)
            self.confirmed += 1
        self.is_done = True
