"""The chain: messages pass two stages of workers that ack, nack, reject, die and close early."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.faults.chain import Chain, Progress, body, is_rejected, judge, queue_of, service_of
from tests.faults.figures import say
from tests.integration.queue_logs import tracked
from tests.waiting import deadline_after, within

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
MESSAGES = int(os.environ.get("KAFKAMQ_TEST_CHAIN", "200000"))
KILLS = 8
WORKERS = 2  # of each stage


class Crew:
    """The workers of both stages; who dies is replaced."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._started = 0
        self._running: list[tuple[int, subprocess.Popen[bytes]]] = []
        for stage in (1, 2) * WORKERS:
            self._start(stage)

    def _start(self, stage: int) -> None:
        self._started += 1
        part = replace(self._chain, stage=stage, name=f"stage{stage}-{self._started}")
        command = [sys.executable, "-m", "tests.faults.chain", json.dumps(asdict(part))]
        with Path(part.folder, f"{part.name}.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        self._running.append((stage, process))

    def kill_one(self, rng: random.Random) -> None:
        rng.choice(self._running)[1].kill()

    def replace_dead(self) -> None:
        for stage, process in list(self._running):
            code = process.poll()
            if code is not None:
                assert code in (9, -9), f"a worker of stage {stage} failed: {self._chain.folder}"
                self._running.remove((stage, process))
                self._start(stage)

    def end(self) -> None:
        for _, process in self._running:
            process.terminate()
        for _, process in self._running:
            process.wait(within(60))


def run(chain: Chain, progress: Progress, *, timeout_s: float = 1200.0) -> float:
    """Fill the first queue, and let workers work until all is done; returns the seconds."""
    rng = random.Random(chain.count)
    with ExitStack() as stack:
        service = stack.enter_context(service_of(chain))
        service.create_topics(partitions=8, marker_partitions=4)
        if chain.backend == "markers":
            stack.enter_context(tracked(service.config))
        else:
            for stage in (1, 2):
                queue_of(service, chain, stage).create_topics(partitions=32)
        with queue_of(service, chain, 1).producer() as producer:
            for number in range(chain.count):
                producer.send(body(number), id=str(number))
        began_s, end_s = time.monotonic(), deadline_after(timeout_s)
        looked_s = began_s
        wanted = chain.count + sum(not is_rejected(number, 1) for number in range(chain.count))
        kills = [wanted * (kill + rng.random()) / KILLS for kill in range(KILLS)]
        crew = Crew(chain)
        stack.callback(crew.end)
        while (done := progress.look()) < wanted:
            assert time.monotonic() < end_s, f"{done} of {wanted}: {chain.folder}"
            if kills and done >= kills[0]:
                del kills[0]
                crew.kill_one(rng)
            crew.replace_dead()
            if time.monotonic() - looked_s > 20:
                looked_s = time.monotonic()
                progress.look_at_letters()
            time.sleep(0.1)
        return time.monotonic() - began_s


@pytest.mark.parametrize("backend", ["markers", "offsets", "share", "claims"])
def test_what_is_accepted_passes_both_stages(
    bootstrap: str, namespace: str, tmp_path: Path, backend: str
) -> None:
    """More than once only where a worker died, was closed or was late, by its own history."""
    chain = Chain(
        bootstrap_servers=bootstrap,
        namespace=namespace,
        folder=str(tmp_path),
        backend=backend,
        count=MESSAGES,
    )
    progress = Progress(chain)
    seconds = run(chain, progress)
    wrong, figures = judge(tmp_path, MESSAGES, progress.dead, counts_add_up=backend == "markers")
    say({"chain": backend, "messages": MESSAGES, "seconds": round(seconds, 1), **figures})
    assert not wrong, (len(wrong), wrong[:10])


def test_a_worker_that_acks_before_it_sends_is_seen(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """The red control: what it had acked as it died did not go on."""
    chain = Chain(
        bootstrap_servers=bootstrap,
        namespace=namespace,
        folder=str(tmp_path),
        backend="offsets",
        count=2000,
        is_careless=True,
    )
    with pytest.raises(AssertionError, match="of 3"):
        run(chain, Progress(chain), timeout_s=20)
    wrong, _ = judge(tmp_path, 2000, {1: set(), 2: set()}, counts_add_up=False)
    assert [text for text in wrong if "has no verdict at stage 2" in text]
