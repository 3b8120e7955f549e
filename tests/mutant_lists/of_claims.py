"""Mutants of claims: rules of the log (S), of a client (C), of policy (G), of ranges (RC)."""

from __future__ import annotations

from tests.mutant_lists.mutant import Mutant

CLAIMS = ("tests/unit/test_claims.py",)
MIDDLE = ("tests/unit/test_claims_middle.py",)
CLAIMANT = ("tests/unit/test_claims_claimant.py", "tests/unit/test_claims_claimant_work.py")
POSITIONS = ("tests/unit/test_claims_positions.py",)
RESET = ("tests/unit/test_claims_reset.py",)
POLICY = ("tests/unit/test_claims_policy.py",)
RANGES = ("tests/unit/test_claims_ranges.py",)
RANGES_EXPLORER = ("tests/model/test_ranges_explorer.py",)
WIRE = ("tests/wire/test_marshal.py",)

RULES_PY = "claims/rules/ownership.py"
CLAIMANT_PY = "claims/rules/claimant.py"
RESET_PY = "claims/rules/position_change.py"
RANGE_CLAIMS_PY = "claims/rules/range_log.py"
RANGE_MEMBER_PY = "claims/rules/range_member.py"

OF_CLAIMS = [
    Mutant(
        "S2",
        "a claim that still holds is taken over",
        RULES_PY,
        "        elif self._holds(entry):  # S2: not even by its own holder\n"
        "            return False\n",
        "",
        CLAIMS,
    ),
    Mutant(
        "S2",
        "stale after one interval",
        RULES_PY,
        "self._stale_ms = round(2 * interval_s * 1000)",
        "self._stale_ms = round(interval_s * 1000)",
        CLAIMS,
    ),
    Mutant(
        "S3",
        "whoever heartbeats owns",
        RULES_PY,
        "        else:  # S3\n            entry.rival_at = at\n            return False\n",
        "        else:  # S3\n            entry.own(owner, at)\n",
        CLAIMS,
    ),
    Mutant(
        "S3",
        "a restart moves the position back",
        RULES_PY,
        "            self._hand_over(entry, owner, at)\n"
        "            self._renew(entry, record, at, offset=max(entry.offset, record.offset))\n",
        "            self._hand_over(entry, owner, at)\n"
        "            self._renew(entry, record, at, offset=record.offset)\n",
        CLAIMS,
    ),
    Mutant(
        "S6",
        "anybody may release",
        RULES_PY,
        "        if owner != entry.owner or not entry.has_owner:  # S6\n            return False\n",
        "",
        CLAIMS,
    ),
    Mutant(
        "S7",
        "a reader from the middle accepts a claim beside a contender",
        RULES_PY,
        "            if not self._is_warm() or self._live(entry, self._clock.now_ms):  # S7\n",
        "            if not self._is_warm():  # S7\n",
        MIDDLE,
    ),
    Mutant(
        "C2",
        "handed out after the lease",
        CLAIMANT_PY,
        "return self.phase is Phase.OWNING and monotonic_ms < self.lease_until_ms",
        "return self.phase is Phase.OWNING",
        CLAIMANT,
    ),
    Mutant(
        "C2",
        "a lease begins when the heartbeat is read back",
        CLAIMANT_PY,
        "        self._lease_from_ms = pending.sent_ms  # C2\n",
        "        self._lease_from_ms = monotonic_ms\n",
        CLAIMANT,
    ),
    Mutant(
        "C3",
        "what another took is released",
        CLAIMANT_PY,
        "        if self.token >= 0 and reason is not End.TAKEN:\n",
        "        if self.token >= 0:\n",
        CLAIMANT,
    ),
    Mutant(
        "C6",
        "a batch is committed before its announcement was read back",
        CLAIMANT_PY,
        "        if batch is not None and not batch.is_announced:  # C6\n",
        "        if batch is not None and not (batch.is_announced or batch.is_wanted):\n",
        CLAIMANT,
    ),
    Mutant(
        "C7",
        "a paused group goes on",
        CLAIMANT_PY,
        "            self.release(monotonic_ms, drain_ms=self.config.patience_ms,"
        " reason=End.PAUSED)\n",
        "            pass\n",
        CLAIMANT,
    ),
    Mutant(
        "C7",
        "each flush counts as a check of its speed",
        CLAIMANT_PY,
        "            if is_due and not self._is_looking and",
        "            if not self._is_looking and",
        CLAIMANT,
    ),
    Mutant(
        "G5",
        "no limit on what is held",
        "claims/rules/policy.py",
        "            room = self._max_claims - sum(prospect.is_ours for prospect in prospects)\n",
        "            room = self._max_claims\n",
        POLICY,
    ),
    Mutant(
        "set position",
        "it is over before the resume was read back",
        RESET_PY,
        "            if 0 <= offset < self._read_to(partition):\n",
        "            if 0 <= offset:\n",
        RESET,
    ),
    Mutant(
        "set position",
        "an operator's own pause is ended",
        RESET_PY,
        "max(expires_at_s, was_until_s if was_until_s > now_s else 0)",
        "expires_at_s",
        RESET,
    ),
    Mutant(
        "set position",
        "moved before everything is held",
        RESET_PY,
        "        if len(safe) == len(self._targets):\n",
        "        if safe:\n",
        RESET,
    ),
    Mutant(
        "start",
        "a position beyond the log's end is kept",
        "claims/rules/positions.py",
        "        start = max(latest_offset, earliest_offset)\n",
        "",
        POSITIONS,
    ),
    Mutant(
        "wire",
        "claims are spread by topic and not as Go clients do",
        "claims/wire/marshal.py",
        'int.from_bytes(digest[:8], "little")',
        'int.from_bytes(digest[:8], "big")',
        WIRE,
    ),
    Mutant(
        "audit",
        "two owners are not found",
        "claims/rules/audit.py",
        "            if other != me and mine_ms >= 0 and at > mine_at:\n",
        "            if other != me and mine_ms >= 0 and at > mine_at + 10**9:\n",
        POLICY,
    ),
    Mutant(
        "RC2",
        "a range that is held is claimed again",
        RANGE_CLAIMS_PY,
        "            if known.next != record.next or self._is_held(known):\n",
        "            if known.next != record.next:\n",
        RANGES,
    ),
    Mutant(
        "RC3",
        "a reader from the middle claims at once",
        RANGE_CLAIMS_PY,
        "        if not self.is_warm or not 0 < record.next - record.first <= MAX_RANGE:\n",
        "        if not 0 < record.next - record.first <= MAX_RANGE:\n",
        RANGES,
    ),
    Mutant(
        "RC4",
        "what is abandoned is not told again",
        RANGE_MEMBER_PY,
        "        yield from self.tell(partitions, monotonic_ms, now_s)\n",
        "",
        RANGES_EXPLORER,
    ),
    Mutant(
        "RC4",
        "what was told to be free is not given to the owner who beats",
        RANGE_CLAIMS_PY,
        "            known.is_hearsay = known.is_free = False\n",
        "            known.is_hearsay = False\n",
        RANGES,
    ),
    Mutant(
        "RC7",
        "a range is worked on without end",
        RANGE_MEMBER_PY,
        "return since_ms is not None and monotonic_ms < since_ms + self._interval_ms",
        "return since_ms is not None",
        RANGES,
    ),
]
