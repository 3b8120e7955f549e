"""How the pages are served, and what is refused before anything listens."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kafkamq.errors import ConfigError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
VIEWER, OPERATOR = "viewer", "operator"
MAX_PASSWORD_FILE_BYTES = 1 << 20
MAX_WORKERS = 100
_URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(\d{1,5}))?(/[\w.~/-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class User:
    name: str
    role: str


@dataclass(frozen=True, slots=True)
class Account:
    role: str
    password_hash: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class WebOptions:
    """These say where pages are served, and to whom."""

    host: str = "127.0.0.1"
    # 0: a free port.
    port: int = 8686
    accounts: Mapping[str, Account] = field(default_factory=dict, repr=False)
    # The header in which a proxy names the user, and the addresses from which it counts.
    trusted_header: str = ""
    trusted_proxies: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()
    allowed_hosts: frozenset[str] = frozenset()
    hides_payloads: bool = False
    read_only: bool = False
    workers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.trusted_header) != bool(self.trusted_proxies):
            raise ConfigError(
                "trusted_header and trusted_proxy belong together: the header counts only in"
                " requests of that address"
            )
        for address in self.trusted_proxies:
            try:
                ipaddress.ip_address(address)
            except ValueError:  # noqa: PERF203 - of one or two
                raise ConfigError(f"trusted_proxy is {address!r}: it must be an address") from None
        for url in self.workers:
            found = _URL.fullmatch(url)
            if not found or int(found[2] or 1) >= 1 << 16:
                raise ConfigError(f"worker is {url[:80]!r}: it must be as http://host:9400")
        if len(self.workers) > MAX_WORKERS:
            asked = len(self.workers)
            raise ConfigError(f"{asked} times worker: {MAX_WORKERS} are asked at most")
        if self.host not in LOOPBACK and not self.authenticates:
            raise ConfigError(
                f"host is {self.host!r}: an address that is not loopback needs authentication, by"
                " --password-file, or by --trusted-header and --trusted-proxy"
            )

    @property
    def authenticates(self) -> bool:
        return bool(self.accounts) or bool(self.trusted_header)

    @property
    def hosts(self) -> frozenset[str]:
        """Return the values of ``Host`` that are answered, without the port, in lower case."""
        named = {each.casefold() for each in self.allowed_hosts}
        return frozenset(LOOPBACK | named | {self.host.casefold()})


def read_accounts(path: Path) -> dict[str, Account]:
    """Read the password file: lines ``NAME:ROLE:HASH``, by argon2; ``#`` begins a comment.

    Raises:
        ConfigError: It cannot be read, or a line has another form; never shows a hash.
    """
    try:
        if path.stat().st_mode & 0o007:
            raise ConfigError(f"{path}: others may read or write it; chmod o= first")
        with path.open(encoding="utf-8") as file:
            lines = file.read(MAX_PASSWORD_FILE_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it ({type(error).__name__})") from None
    accounts = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, rest = line.strip().partition(":")
        role, _, password_hash = rest.partition(":")
        is_hash = password_hash.startswith("$argon2")
        if not name or role not in (VIEWER, OPERATOR) or not is_hash or name in accounts:
            raise ConfigError(
                f"{path}, line {number}: it must be NAME:{VIEWER}:HASH or NAME:{OPERATOR}:HASH,"
                " each name once, with a hash by argon2 ('kafkamq web --hash-password' makes one)"
            )
        accounts[name] = Account(role, password_hash)
    if not accounts:
        raise ConfigError(f"{path}: it names nobody")
    return accounts
