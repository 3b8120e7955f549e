"""A broker that asks who is there: SASL_SSL with SCRAM, mutual TLS, and rights by ACLs.

Beside these doors it has LocalKafka's open one, whose users may do everything: the tests make
users, rights and topics there, and read the logs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from tests.waiting import wait_until, within

from kafkamq.dev import Listener, LocalKafka

__all__ = ["Certificates", "Right", "SecuredKafka", "secured_kafka"]

_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required;"


class Certificates:
    """An authority of its own, a broker's certificate, and clients', made by openssl."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = folder / "ca.pem"
        self._run(
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kafkamq-tests "
            "-keyout ca.key -out ca.pem"
        )
        self.broker = self._issue("broker", "subjectAltName=IP:127.0.0.1,DNS:localhost")

    def client(self, name: str) -> tuple[Path, Path]:
        """Certificate and key of ``User:name``."""
        self._issue(name, "extendedKeyUsage=clientAuth")
        return self._folder / f"{name}.pem", self._folder / f"{name}.key"

    def _issue(self, name: str, extension: str) -> Path:
        request = f"-subj /CN={name} -keyout {name}.key -out {name}.csr"
        self._run(f"req -newkey rsa:2048 -nodes {request}")
        (self._folder / f"{name}.ext").write_text(extension)
        self._run(
            f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
            f"-extfile {name}.ext -out {name}.pem"
        )
        both = self._folder / f"{name}-both.pem"
        key, certificate = (self._folder / f"{name}.{end}" for end in ("key", "pem"))
        both.write_text(key.read_text() + certificate.read_text())
        return both

    def _run(self, command: str) -> None:
        subprocess.run(
            ["openssl", *command.split()], cwd=self._folder, check=True, capture_output=True
        )


@dataclass(frozen=True)
class Right:
    """One row of an ACL table: what may be done to what; a name that ends in * is a prefix."""

    resource: str  # topic, group, transactional-id or cluster
    name: str
    operation: str  # Kafka's word, such as DESCRIBE_CONFIGS

    def __str__(self) -> str:
        return f"{self.operation} {self.resource} {self.name}"

    def binding(self, user: str) -> AclBinding:
        kinds = {
            "topic": ResourceType.TOPIC,
            "group": ResourceType.GROUP,
            "transactional-id": ResourceType.TRANSACTIONAL_ID,
            "cluster": ResourceType.BROKER,
        }
        is_prefix = self.name.endswith("*") and len(self.name) > 1
        return AclBinding(
            kinds[self.resource],
            "kafka-cluster" if self.resource == "cluster" else self.name.rstrip("*") or "*",
            ResourcePatternType.PREFIXED if is_prefix else ResourcePatternType.LITERAL,
            f"User:{user}",
            "*",
            AclOperation[self.operation],
            AclPermissionType.ALLOW,
        )


class SecuredKafka:
    """The broker, its users and their rights."""

    def __init__(self, kafka: LocalKafka, certificates: Certificates) -> None:
        self.kafka = kafka
        self.certificates = certificates
        self.open = kafka.bootstrap_servers
        self._admin = AdminClient({"bootstrap.servers": self.open})

    @property
    def scram(self) -> str:
        """The address of the door that asks for name and password."""
        return self.kafka.address_of("SCRAM")

    @property
    def mutual(self) -> str:
        """The address of the door that asks for a certificate."""
        return self.kafka.address_of("MUTUAL")

    def add_user(self, user: str, password: str) -> None:
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        change = UserScramCredentialUpsertion(user, info, password.encode())
        for future in self._admin.alter_user_scram_credentials([change]).values():
            future.result(within(20))

    def grant(self, user: str, rights: Iterable[Right]) -> None:
        """Give these rights; returns when the broker goes by them."""
        bindings = {right.binding(user) for right in rights}
        for future in self._admin.create_acls(list(bindings)).values():
            future.result(within(20))
        any_of = AclBindingFilter(
            ResourceType.ANY, None, ResourcePatternType.ANY, f"User:{user}", None,
            AclOperation.ANY, AclPermissionType.ANY,
        )  # fmt: skip
        wait_until(
            lambda: bindings <= set(self._admin.describe_acls(any_of).result(within(20))),
            "the broker to learn of the rights",
        )

    def denials(self, since: int = 0) -> list[str]:
        """What the broker refused, by its log from a position on."""
        text = self.kafka.log_path.read_bytes()[since:].decode(errors="replace")
        return [line for line in text.splitlines() if "is Denied" in line]

    def scram_settings(self, user: str, password: str) -> dict[str, str]:
        """Kafka's properties of a client with name and password."""
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": password,
            "ssl.ca.location": str(self.certificates.authority),
        }

    def mutual_settings(self, user: str) -> dict[str, str]:
        """Kafka's properties of a client with a certificate."""
        certificate, key = self.certificates.client(user)
        return {
            "security.protocol": "SSL",
            "ssl.ca.location": str(self.certificates.authority),
            "ssl.certificate.location": str(certificate),
            "ssl.key.location": str(key),
        }


def listeners(certificates: Certificates) -> Sequence[Listener]:
    tls = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificates.broker),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates.authority),
    }
    scram = {
        **tls,
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "scram-sha-512.sasl.jaas.config": _SCRAM,
    }
    mutual = {
        **tls,
        "ssl.client.auth": "required",
        "ssl.principal.mapping.rules": "RULE:^CN=(.*)$/$1/",
    }
    return (
        Listener(name="SCRAM", protocol="SASL_SSL", properties=scram),
        Listener(name="MUTUAL", protocol="SSL", properties=mutual),
    )


@contextmanager
def secured_kafka(folder: Path) -> Iterator[SecuredKafka]:
    """A running one; its certificates are in ``folder``."""
    certificates = Certificates(folder)
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # whoever comes through the open door
    }
    with LocalKafka(properties=properties, listeners=listeners(certificates)) as kafka:
        yield SecuredKafka(kafka, certificates)
