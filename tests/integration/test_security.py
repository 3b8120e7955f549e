"""Names, certificates, rights and secrets, on a broker that asks for them."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration import claim_roles, roles
from tests.integration.cli_tools import Commands
from tests.integration.queue_logs import receive_all
from tests.integration.roles import (
    ACTIONS,
    ROLES,
    load_tracker,
    make_topic,
    rights_of,
)
from tests.integration.secured import Right, SecuredKafka, secured_kafka
from tests.integration.tracker_logs import Logs, read_topic
from tests.waiting import wait_until, within

from kafkamq import Service
from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError
from kafkamq.markers.state import MarkerWriter
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.parallel.consumer import ParallelConsumer
from kafkamq.queue.namespace import CONNECT_TIMEOUT_S
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import LogReader
from kafkamq.web.app import serving
from kafkamq.web.index.follower import IndexOptions
from kafkamq.web.options import WebOptions

CANARY = "canary-Pa55word-7f3a9c"
DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"
SPARK_DRIVER = Path(__file__).with_name("secured_spark.py")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with secured_kafka(tmp_path_factory.mktemp("certificates")) as kafka:
        yield kafka


def new_user(secured: SecuredKafka, rights: list[Right]) -> str:
    user = f"user-{next(_numbers)}"
    secured.add_user(user, CANARY)
    secured.grant(user, rights)
    return user


def config_of(secured: SecuredKafka, namespace: str, user: str) -> ServiceConfig:
    settings = secured.scram_settings(user, CANARY)
    return ServiceConfig(bootstrap_servers=secured.scram, namespace=namespace, kafka=settings)


# ---- rights


# On Spark a role takes half a minute.
ON_SPARK = pytest.param("Spark worker", marks=(pytest.mark.spark, pytest.mark.faults))
TESTED = [*(role for role in ROLES if not role.startswith("Spark")), ON_SPARK]


@pytest.mark.parametrize("role", TESTED)
def test_a_role_needs_no_more_than_its_rights(
    secured: SecuredKafka, namespace: str, role: str
) -> None:
    """The Spark tracker's are used below, where its secrets are looked for."""
    logs = Logs(secured.open, namespace)
    user = new_user(secured, rights_of(role, namespace))
    ACTIONS[role](config_of(secured, namespace, user), logs)


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", TESTED)
def test_a_role_needs_each_of_its_rights(
    secured: SecuredKafka, namespace: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any one of them something fails, and says so."""
    for module in (roles, claim_roles):  # what only waits in vain fails, too
        monkeypatch.setattr(module, "WAIT_S", 12.0)
    superfluous = []
    for number in range(len(ROLES[role])):
        own = f"{namespace[:-8]}{number}"
        logs = Logs(secured.open, own)
        rights = rights_of(role, own)
        missing = rights.pop(number)
        user = new_user(secured, rights)
        since = secured.kafka.log_path.stat().st_size
        try:
            ACTIONS[role](config_of(secured, own, user), logs)
        except (KafkaMQError, AssertionError):
            continue
        if not secured.denials(since):
            superfluous.append(str(missing))
    assert not superfluous


@pytest.mark.parametrize(
    ("operations", "text"),
    [
        (("DESCRIBE",), "lacks Read"),
        (("READ",), "enough for workers"),
        (("READ", "WRITE"), ""),
    ],
)
def test_doctor_says_what_its_principal_may_do_with_a_topic(
    secured: SecuredKafka, namespace: str, operations: tuple[str, ...], text: str
) -> None:
    topic = make_topic(Logs(secured.open, namespace))
    rights = [Right("topic", topic, each) for each in (*operations, "DESCRIBE_CONFIGS")]
    user = new_user(secured, [*rights_of("operator", namespace), *rights])
    commands = Commands(secured.scram, namespace, secured.scram_settings(user, CANARY))
    (found,) = commands.json("doctor", "--topic", topic)
    said = [each["text"] for each in found["checks"] if "principal" in each["text"]]
    assert len(said) == bool(text)
    assert all(text in each for each in said)


@pytest.mark.parametrize("what", ["producer", "consumer", "tracker"])
def test_a_missing_right_is_reported_at_once(
    secured: SecuredKafka, namespace: str, what: str
) -> None:
    """It may look at all topics, but neither read nor write."""
    Logs(secured.open, namespace)
    rights = [right for right in rights_of("worker", namespace) if "DESCRIBE" in right.operation]
    config = config_of(secured, namespace, new_user(secured, rights))
    with Service(config.bootstrap_servers, namespace, kafka=config.kafka) as service:
        queue = service.queue("a")
        steps = {
            "producer": lambda: queue.producer().send(b"x").result(3600),
            "consumer": lambda: queue.consumer().receive(3600),
            "tracker": lambda: LocalTracker(config).run(),
        }
        with pytest.raises(BrokerError, match="grant this principal") as raised:
            steps[what]()
    assert not raised.value.is_retriable


def test_a_missing_right_on_a_group_is_reported(secured: SecuredKafka, namespace: str) -> None:
    """The client would wait for the group's coordinator until its time is over."""
    logs = Logs(secured.open, namespace)
    rights = [Right("topic", f"{namespace}.*", "DESCRIBE")]
    config = config_of(secured, namespace, new_user(secured, rights))
    with (
        Admin(config, timeout_s=2.0) as admin,
        pytest.raises(BrokerError, match="grant this principal Read on the group"),
    ):
        admin.committed([("nobody's", (logs.config.marker_topic, 0))])


def test_a_writer_that_held_nothing_ends_in_peace(secured: SecuredKafka, namespace: str) -> None:
    """The fatal error waits in the client's queue like a marker, and is none."""
    Logs(secured.open, namespace)
    rights = [right for right in rights_of("worker", namespace) if "DESCRIBE" in right.operation]
    config = config_of(secured, namespace, new_user(secured, rights))
    with Service(config.bootstrap_servers, namespace, kafka=config.kafka) as service:
        writer = MarkerWriter(service._connections.namespace)
        wait_until(lambda: len(writer) > 0)
        writer.flush(0.25)
        assert writer.is_idle
        writer.close()


@pytest.mark.parametrize("missing", ["WRITE", "group", "transactional-id"])
def test_a_missing_right_ends_claims_at_once(
    secured: SecuredKafka, namespace: str, missing: str
) -> None:
    """Rather than one attempt after another."""
    logs = Logs(secured.open, namespace)
    role = "fenced claims member"
    rights = [
        right
        for right in rights_of(role, namespace)
        if missing not in (right.operation, right.resource) or right.name == "kafkamq.reader"
    ]
    config = config_of(secured, namespace, new_user(secured, rights))
    with pytest.raises(BrokerError, match="grant this principal") as raised:
        ACTIONS[role](config, logs)
    assert not raised.value.is_retriable


def test_the_table_of_rights_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for role, rights in ROLES.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {role} |")]
        for _, name, operation in rights:
            word = operation.title().replace("_", "")
            assert word in row, (role, operation, name)


# ---- certificates


def test_mutual_tls(secured: SecuredKafka, namespace: str) -> None:
    """The certificate's name is the user that the rights are given to."""
    Logs(secured.open, namespace)
    user = f"certified-{next(_numbers)}"
    secured.grant(user, {*rights_of("producer", namespace), *rights_of("worker", namespace)})
    settings = secured.mutual_settings(user)
    with Service(secured.mutual, namespace, kafka=settings) as service:
        service.queue("a").producer().send(b"x").result(within(60))
        (message,) = receive_all(service.queue("a").consumer(), 1)
        message.ack(wait=True)


def without_certificate(secured: SecuredKafka) -> dict[str, str]:
    return {
        "security.protocol": "SSL",
        "ssl.ca.location": str(secured.certificates.authority),
    }


def with_foreign_authority(secured: SecuredKafka) -> dict[str, str]:
    return {"security.protocol": "SSL"}  # the system's authorities


@pytest.mark.parametrize("settings", [without_certificate, with_foreign_authority])
def test_a_certificate_that_will_not_do_is_reported_at_once(
    secured: SecuredKafka, namespace: str, settings: Callable[[SecuredKafka], dict[str, str]]
) -> None:
    with Service(secured.mutual, namespace, kafka=settings(secured)) as service:
        began_s = time.monotonic()
        with pytest.raises((BrokerError, DeadlineExceededError), match="certificate"):
            service.queue("a").producer()
        assert time.monotonic() - began_s < CONNECT_TIMEOUT_S


# ---- secrets


def all_starts(service: Service) -> dict[str, Callable[[], object]]:
    """Everything that connects."""
    config = service.config
    parallel = ParallelConsumer(
        "a", group_id="g", bootstrap_servers=config.bootstrap_servers, kafka=config.kafka
    )
    reader = LogReader(config)
    return {
        "producer": service.queue("a").producer,
        "consumer": service.queue("a").consumer,
        "create": service.create_topics,
        "tracker": lambda: LocalTracker(config),
        "parallel consumer": lambda: parallel.poll(print),
        "Spark's source": lambda: reader.partition_count("a"),
        "Spark's source, of offsets": lambda: reader.log_starts("a", [0]),
    }


def test_a_wrong_password_is_a_clear_error(
    secured: SecuredKafka, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a wait; and neither the message, the traceback, nor a log line shows it."""
    caplog.set_level(logging.DEBUG)
    settings = secured.scram_settings("nobody", CANARY)
    config = ServiceConfig(bootstrap_servers=secured.scram, namespace=namespace, kafka=settings)
    service = Service(config.bootstrap_servers, config.namespace, kafka=config.kafka)
    for what, start in all_starts(service).items():
        began_s = time.monotonic()
        with pytest.raises(BrokerError, match=r"sasl\.password") as raised:
            start()
        assert time.monotonic() - began_s < CONNECT_TIMEOUT_S, what
        assert not raised.value.is_retriable
        shown = "".join(traceback.format_exception(raised.value))
        assert CANARY not in shown + repr(raised.value) + repr(config)
    service.close()
    assert CANARY not in caplog.text


def test_a_command_with_a_wrong_password(secured: SecuredKafka, namespace: str) -> None:
    environment = {
        **os.environ,
        "KAFKAMQ_BOOTSTRAP_SERVERS": secured.scram,
        "KAFKAMQ_NAMESPACE": namespace,
        **{
            "KAFKAMQ_KAFKA__" + name.upper().replace(".", "_"): value
            for name, value in secured.scram_settings("nobody", CANARY).items()
        },
    }
    done = subprocess.run(
        [sys.executable, "-m", "kafkamq.cli", "stat"],
        env=environment, capture_output=True, text=True, timeout=within(60), check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "sasl.password" in done.stderr
    assert CANARY not in done.stdout + done.stderr


def test_pages_with_a_wrong_password_say_so(
    secured: SecuredKafka, namespace: str, tmp_path: Path
) -> None:
    settings = secured.scram_settings("nobody", CANARY)
    config = ServiceConfig(bootstrap_servers=secured.scram, namespace=namespace, kafka=settings)

    def shown(address: str) -> str:
        try:
            with urllib.request.urlopen(address, timeout=within(30)) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()

    index = IndexOptions(path=tmp_path / "index")
    with serving(config, WebOptions(port=0), index) as address:
        for path in ("", "dead-letters", "jobs", "actions", "api/state"):
            wait_until(lambda path=path: "sasl.password" in shown(address + path), path)
            assert CANARY not in shown(address + path)


def command_lines() -> str:
    """The command line of every process of this machine that can be seen."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:  # noqa: PERF203 - it ended
            continue
    return "\n".join(found)


def pages(address: str) -> str:
    """What Spark's own pages and its interface for programs show."""
    paths = ["/environment/", "/SQL/", "/StreamingQuery/", "/jobs/", "/executors/"]
    found = []
    for path in paths:
        with urllib.request.urlopen(address + path, timeout=within(20)) as answer:
            found.append(answer.read().decode(errors="replace"))
    return "\n".join(found)


@pytest.mark.spark
@pytest.mark.faults  # only for its half minute
def test_spark_works_over_sasl_ssl_and_shows_no_secret(
    secured: SecuredKafka, namespace: str, tmp_path: Path
) -> None:
    """The clients in the workers have the password; nothing that people look at shows it."""
    logs = Logs(secured.open, namespace)
    user = new_user(secured, rights_of("Spark tracker", namespace))
    load_tracker(logs)
    events = tmp_path / "events"
    events.mkdir()
    output = tmp_path / "output"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, str(SPARK_DRIVER), secured.scram, namespace, str(tmp_path)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                **{f"SECURED_{n}": v for n, v in secured.scram_settings(user, CANARY).items()},
            },
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: process.poll() is not None or (logs.copies() and logs.dead_letters()),
            timeout_s=120,
        )
        assert process.poll() is None, output.read_text(errors="replace")[-3000:]
        address = (tmp_path / "address").read_text().strip()
        seen = pages(address) + command_lines()
        assert namespace in seen  # the right pages, the right processes
        assert CANARY not in seen
        process.communicate(b"stop\n", timeout=within(60))
        assert process.returncode == 0, output.read_text(errors="replace")[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait(within(20))
    places = [output, *(path for path in events.rglob("*") if path.is_file())]
    places += [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert len(places) > 5
    assert not [str(path) for path in places if CANARY.encode() in path.read_bytes()]


# ---- a queue on a share group

_SHARE = (
    ("cluster", "kafka-cluster", "DESCRIBE_CONFIGS"),
    ("group", "NS.share", "READ"),
    ("group", "NS.share", "DESCRIBE_CONFIGS"),
    ("group", "NS.share", "ALTER_CONFIGS"),
    ("topic", "NS.queue", "READ"),
    ("topic", "NS.queue", "DESCRIBE_CONFIGS"),
    ("topic", "NS.queue", "WRITE"),  # copies to its tail
    ("topic", "NS.dead-letters", "DESCRIBE"),
    ("topic", "NS.dead-letters", "DESCRIBE_CONFIGS"),
)
_LETTERS = ("topic", "NS.dead-letters", "WRITE")


@pytest.mark.faults
def test_a_share_queue_without_rights_to_its_dead_letters_keeps_what_it_gives_up(
    secured: SecuredKafka, namespace: str
) -> None:
    """The broker would give them up in silence; copies keep them until the letters are written."""

    def rights(*rows: tuple[str, str, str]) -> list[Right]:
        return [Right(kind, name.replace("NS", namespace), what) for kind, name, what in rows]

    user = new_user(secured, rights(*_SHARE))
    config = config_of(secured, namespace, user)
    options = {"backend": "share", "group": f"{namespace}.share", "topic": f"{namespace}.queue"}
    with Service(secured.open, namespace) as everything:
        queue = everything.queue("q", **options)
        queue.create_topics(partitions=1)
        producer = queue.producer()
        sent = [b"%d" % number for number in range(3)]
        for payload in sent:
            producer.send(payload).result(within(30))
        with (
            Service(config.bootstrap_servers, namespace, kafka=config.kafka) as service,
            service.queue("q", max_deliveries=1, **options).consumer() as consumer,
        ):
            for message in receive_all(consumer, 3, timeout_s=60):
                message.reject("no good")
            topic, letters = f"{namespace}.queue", config.dead_letter_topic
            wait_until(lambda: len(read_topic(secured.open, topic)) >= 6)  # the copies
            assert read_topic(secured.open, letters) == []
            secured.grant(user, rights(_LETTERS))
            wait_until(
                lambda: {each.value() for each in read_topic(secured.open, letters)} == set(sent)
            )
            consumer.flush(within(60))
