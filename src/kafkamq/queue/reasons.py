"""The text of a verdict: what the user's code raised or gave, made fit for a header."""

from __future__ import annotations

from kafkamq.queue.wire.headers import cut_text

__all__ = ["clean", "reason_of"]


def clean(reason: object) -> str:
    """A reason as it can be written: at most 4096 bytes, without lone surrogates."""
    return cut_text(reason if isinstance(reason, str) else repr(reason))


def reason_of(error: BaseException) -> str:
    """The kind of an error and what it says; never raises."""
    try:
        return clean(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 - of the user's own __str__: the verdict matters more
        return type(error).__name__
