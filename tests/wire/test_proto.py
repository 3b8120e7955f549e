"""The generated code is that of ``markers.proto``, and runs on every protobuf that we allow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

import kafkamq.markers.wire
from kafkamq.markers.wire import markers_pb2 as pb
from kafkamq.types import MarkerType, Outcome

WIRE = Path(kafkamq.markers.wire.__file__).parent
ROOT = Path(__file__).resolve().parents[2]


def compiled(folder: Path, source: Path) -> descriptor_pb2.FileDescriptorProto:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")
    target = folder / "set.bin"
    arguments = [f"-I{source.parents[3]}", f"--descriptor_set_out={target}", str(source)]
    assert protoc.main(["protoc", *arguments]) == 0
    files = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes())
    (file,) = files.file
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")  # generated code leaves it out
    return file


def generated() -> descriptor_pb2.FileDescriptorProto:
    return descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    assert compiled(tmp_path, WIRE / "markers.proto") == generated()


def test_a_changed_proto_would_be_noticed(tmp_path: Path) -> None:
    source = tmp_path / "kafkamq" / "markers" / "wire" / "markers.proto"
    source.parent.mkdir(parents=True)
    text = (WIRE / "markers.proto").read_text()
    source.write_text(text.replace("string reason = 24;", "string reason = 23;"))
    assert compiled(tmp_path, source) != generated()


def test_generated_code_is_older_than_every_runtime_that_we_allow() -> None:
    code = (WIRE / "markers_pb2.py").read_text()
    version = re.search(r"# Protobuf Python Version: (\d+)\.(\d+)\.", code)
    bounds = re.findall(r'"protobuf>=(\d+)\.(\d+)', (ROOT / "pyproject.toml").read_text())
    assert version is not None
    assert bounds
    for bound in bounds:
        assert tuple(map(int, version.groups())) <= tuple(map(int, bound))


def test_enums_are_those_of_the_proto() -> None:
    assert {kind.name: kind.value for kind in MarkerType} == dict(pb.MarkerType.items())
    assert {outcome.name: outcome.value for outcome in Outcome} == dict(pb.Outcome.items())
