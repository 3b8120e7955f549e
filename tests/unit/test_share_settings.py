"""The session of a share group: what is asked, within what the brokers allow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kafkamq import BrokerError, ConfigError
from kafkamq.config import ServiceConfig
from kafkamq.share.settings import ShareLimits, shorten_session


def limits(*, session_ms: int = 45_000, lowest_ms: int = 3000) -> ShareLimits:
    return ShareLimits(
        min_lock_ms=15_000,
        max_lock_ms=60_000,
        max_deliveries=5,
        max_members=200,
        session_ms=session_ms,
        min_session_ms=lowest_ms,
        max_session_ms=60_000,
    )


def admin(set_group, **kafka: str):
    named = {name.replace("_", "."): value for name, value in kafka.items()}
    config = ServiceConfig(bootstrap_servers="x:1", namespace="n", kafka=named)
    return SimpleNamespace(config=config, set_group=set_group)


@pytest.mark.parametrize(
    ("given", "found", "wanted_ms", "is_set"),
    [
        ({}, limits(), 10_000, True),
        ({}, limits(lowest_ms=45_000), 45_000, False),
        ({}, limits(session_ms=10_000), 10_000, False),
        ({"session_timeout_ms": "6000"}, limits(), 6000, True),
        ({"session_timeout_ms": "90000"}, limits(), 60_000, True),
    ],
)
def test_what_a_group_gets(given, found, wanted_ms, is_set) -> None:
    calls = []
    asked = admin(lambda *call: calls.append(call), **given)
    assert shorten_session(asked, "g", found) == wanted_ms
    asked = [("g", {"share.session.timeout.ms": str(wanted_ms)})]
    assert calls == (asked if is_set else [])


def test_a_refusal_is_not_fatal(caplog) -> None:
    def refuse(*_: object) -> None:
        raise BrokerError("not allowed", code="GROUP_AUTHORIZATION_FAILED")

    assert shorten_session(admin(refuse), "g", limits()) == 45_000
    assert "stays as it is" in caplog.text


def test_a_session_is_a_number() -> None:
    with pytest.raises(ConfigError, match="it must be a number of milliseconds"):
        shorten_session(admin(None, session_timeout_ms="6s"), "g", limits())
