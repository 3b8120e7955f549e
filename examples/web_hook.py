"""A worker hands orders over to a service, whose call-back finishes them: minutes or a day later.

    python examples/web_hook.py localhost:9092 http://partner.example/orders 8080

The worker sends each order to the service with the address to call when it is done, and ends with
its part there: ``hold`` keeps the message from being redelivered for a day. The call-back is a
POST to ``/done/TOKEN``, ``/failed/TOKEN`` or ``/later/TOKEN``; the process that takes it may be
another one than the worker, or a later one. Check who calls, as a token proves nothing.
"""

from __future__ import annotations

import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from kafkamq import ConfigError, LeaseLostError, Message, Queue, Service, StateError, Worker

DAY_S = 86_400.0


def hand_over(queue: Queue, message: Message, service: str, callback: str) -> None:
    """Sends an order to the service, which may call back before it answers."""
    token = message.hold(DAY_S)
    request = urllib.request.Request(
        service, message.payload, {"X-Callback": f"{callback}/TASK/{token}"}
    )
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except OSError as error:  # an exception would nack it, but it is held elsewhere now
        queue.nack(token, reason=str(error))


def finish(queue: Queue, task: str, token: str) -> int:
    """Gives the verdict of a call-back; the HTTP status that says what became of it."""
    try:
        if task == "done":
            queue.ack(token)
        elif task == "failed":
            queue.reject(token, "the service could not do it")
        elif task == "later":
            queue.nack(token, delay=60.0, reason="the service was busy")
        else:
            return 404
    except ConfigError:  # no token of this queue
        return 400
    except LeaseLostError:  # it is delivered again
        return 410
    except StateError:  # it had its verdict: call-backs are repeated
        return 409
    return 200


def call_backs(queue: Queue, port: int) -> ThreadingHTTPServer:
    """The server of the call-backs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            _, task, token = [*self.path.split("/"), "", ""][:3]
            self.send_response(finish(queue, task, token))
            self.end_headers()

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    """Hands over until it is asked to stop."""
    bootstrap, service_url, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with Service(bootstrap, *sys.argv[4:5]) as service:
        orders = service.queue("orders", max_lease=2 * DAY_S)

        @orders.handler()
        def handle(message: Message) -> None:
            hand_over(orders, message, service_url, f"http://127.0.0.1:{port}")

        with call_backs(orders, port) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            print("ready", flush=True)
            Worker(service).run()
            server.shutdown()


if __name__ == "__main__":
    main()
