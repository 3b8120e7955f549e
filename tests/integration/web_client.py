"""What a script does with the pages: the JSON of one process."""

from __future__ import annotations

import json
import urllib.request
from typing import Any
from urllib.parse import urlencode

from tests.waiting import wait_until, within


class WebClient:
    """It asks one address, and knows its token."""

    def __init__(self, address: str, *, timeout_s: float = 60.0) -> None:
        self.address = address
        self.timeout_s = timeout_s
        wait_until(lambda: self.get("state")["is_caught_up"], "the index is made", timeout_s)
        self._token = self.get("state")["csrf"]

    def get(self, path: str) -> Any:
        return self._ask(urllib.request.Request(f"{self.address}api/{path}"))

    def post(self, path: str, **data: Any) -> Any:
        headers = {"x-csrf-token": self._token, "content-type": "application/json"}
        body = json.dumps(data).encode()
        return self._ask(urllib.request.Request(f"{self.address}api/{path}", body, headers))

    def page(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.address}{path}", timeout=within(60)) as answer:
            return str(answer.read().decode())

    def send_form(self, path: str, **fields: str) -> str:
        """The page that follows a form."""
        body = urlencode({**fields, "csrf": self._token}).encode()
        request = urllib.request.Request(f"{self.address}{path}", body)
        with urllib.request.urlopen(request, timeout=within(60)) as answer:
            return str(answer.read().decode())

    def _ask(self, request: urllib.request.Request) -> Any:
        with urllib.request.urlopen(request, timeout=within(60)) as answer:
            return json.loads(answer.read())

    def job(self, id: str) -> dict[str, Any]:
        """Return the job as it is now; nothing where this process has not read of it."""
        return next((job for job in self.get("jobs")["jobs"] if job["id"] == id), {})

    def wait_for(self, id: str, state: str) -> dict[str, Any]:
        what = f"the job is {state}"
        wait_until(lambda: self.job(id).get("state") == state, what, self.timeout_s)
        return self.job(id)

    def wait_for_more(self, id: str) -> None:
        """Return when the job has sent some back since."""
        done = self.job(id)["done"]
        wait_until(lambda: self.job(id)["done"] > done, "the job goes on", self.timeout_s)
