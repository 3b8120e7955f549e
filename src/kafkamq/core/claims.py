"""Public names of :mod:`kafkamq.claims.rules.log`."""

from kafkamq.claims.rules.log import Claim, ClaimLog, ClaimState

__all__ = ["Claim", "ClaimLog", "ClaimState"]
