"""Versioned JSON objects, read strictly: ledger entries (R22) and trackers' status (R24)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from kafkamq.errors import UnsupportedVersionError, WireError

_MAX_INT64 = 0x7FFF_FFFF_FFFF_FFFF
_MAX_TEXT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonForm:
    """One kind of object; its methods raise WireError, naming it and the field."""

    name: str  # in error texts
    version: int  # that this release writes, and the only one that it reads
    version_field: str
    max_bytes: int  # of the text

    def write(self, values: Mapping[str, int | str | bool | None]) -> str:
        """The compact text, in ASCII; the values are checked already."""
        fields = {self.version_field: self.version, **values}
        text = json.dumps(fields, separators=(",", ":"))
        self._require_size(len(text))
        return text

    def read(self, text: str | bytes) -> dict[str, object]:
        """The fields, unknown ones among them; a newer version is an UnsupportedVersionError."""
        self._require_size(len(text))
        try:
            fields: object = json.loads(text)
        except (ValueError, RecursionError):
            raise WireError(f"{self.name} is not JSON") from None
        if not isinstance(fields, dict):
            raise WireError(f"{self.name} is not a JSON object")
        version = self.number(fields.get(self.version_field), "version")
        if version < self.version:
            raise WireError(f"{self.name} of version {version}, which never was")
        if version > self.version:
            raise UnsupportedVersionError(
                f"{self.name} has version {version}, this release reads {self.version}: "
                "upgrade kafkamq"
            )
        return fields

    def number(self, value: object, field: str) -> int:
        """A number from 0 to 2^63 - 1."""
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT64:
            raise WireError(f"{field} of {self.name} must be a number from 0 to 2^63 - 1")
        return value

    def optional(self, value: object, field: str) -> int | None:
        """A number, or None where the field is null."""
        return None if value is None else self.number(value, field)

    def text(self, value: object, field: str) -> str:
        """A text of at most 1024 characters."""
        if not isinstance(value, str) or len(value) > _MAX_TEXT:
            raise WireError(
                f"{field} of {self.name} must be text of at most {_MAX_TEXT} characters"
            )
        return value

    def flag(self, value: object, field: str) -> bool:
        """True or False."""
        if not isinstance(value, bool):
            raise WireError(f"{field} of {self.name} must be true or false")
        return value

    def _require_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise WireError(f"{self.name} of {size} bytes: {self.max_bytes} at most")
