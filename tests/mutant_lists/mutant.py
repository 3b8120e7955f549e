"""What a mutant is, and short names for the files and tests that mutants are about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change that breaks a rule."""

    rule: str
    breaks: str  # what is wrong with it
    file: str  # below src/kafkamq
    old: str
    new: str
    tests: tuple[str, ...]  # arguments of pytest


TIME = ("tests/unit/test_core_time.py",)
TICKS = ("tests/unit/test_core_ticks.py",)
TABLE = ("tests/unit/test_core_table.py",)
HOLDERS = ("tests/unit/test_core_holders.py",)
MEMORY = ("tests/unit/test_core_memory.py",)
DELIVERY = ("tests/unit/test_core_delivery.py",)
PLAN = ("tests/unit/test_core_plan.py",)
SNAPSHOT = ("tests/unit/test_core_snapshot.py",)
PAGES = ("tests/unit/test_core_pages.py",)
SCHEDULES = ("tests/unit/test_core_schedules.py",)
LEASES = ("tests/unit/test_leases.py", "tests/unit/test_leases_handout.py")
START_REPORTS = ("tests/unit/test_start_reports.py",)
INTAKE = ("tests/unit/test_leases_intake.py",)
LATE_STARTS = ("tests/unit/test_late_starts.py",)
INTERRUPTS = ("tests/unit/test_interrupts.py",)
NUMBERS = ("tests/unit/test_core_numbers.py",)
PACKING = ("tests/unit/test_core_packed.py",)
AGREEMENT = ("tests/model/test_redelivery_agreement.py",)
ATTEMPTS = ("tests/model/test_attempts_model.py",)
WIRE = ("tests/wire/test_markers.py", "tests/wire/test_marker_writer.py")
SIMULATION = ("tests/sim/test_simulation.py",)

CLOCK = "queue/rules/log_clock.py"
REDELIVERY = "markers/rules/redelivery.py"
HOLDERS_PY = "markers/rules/holders.py"
CHUNKS = "markers/rules/chunks.py"
ATTEMPTS_PY = "markers/rules/attempts.py"
ENTRY = "markers/rules/entry.py"
PACKED = "markers/rules/packed.py"
TABLE_PY = "markers/rules/table.py"
DELIVERY_PY = "markers/rules/delivery.py"
RETRY_PY = "queue/rules/retry.py"
TICKS_PY = "markers/rules/ticks.py"
SNAPSHOT_PY = "markers/rules/snapshot.py"
PAGES_PY = "markers/rules/pages.py"
LEASES_PY = "markers/rules/leases.py"
START_REPORTS_PY = "markers/start_reports.py"
STARTS_PY = "markers/starts.py"
HANDOUT = "markers/rules/handout.py"
INTAKE_PY = "markers/rules/fetch_buffer.py"
