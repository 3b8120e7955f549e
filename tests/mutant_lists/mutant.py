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

CLOCK = "core/clock.py"
REDELIVERY = "core/redelivery.py"
HOLDERS_PY = "core/holders.py"
CHUNKS = "core/chunks.py"
ATTEMPTS_PY = "core/attempts.py"
ENTRY = "core/entry.py"
PACKED = "core/packed.py"
TABLE_PY = "core/table.py"
DELIVERY_PY = "core/delivery.py"
TICKS_PY = "core/ticks.py"
SNAPSHOT_PY = "core/snapshot.py"
PAGES_PY = "core/pages.py"
LEASES_PY = "core/leases.py"
START_REPORTS_PY = "kafka/start_reports.py"
STARTS_PY = "kafka/starts.py"
HANDOUT = "core/handout.py"
INTAKE_PY = "core/intake.py"
