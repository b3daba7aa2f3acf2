"""Makes the unmodified `etcd3` 0.12.0 package import under any protobuf.

The package's generated `etcd3/etcdrpc/*_pb2.py` run only with protobuf below 3.21, and pinning that
would downgrade what else lives in the user's environment.  Those files carry their own schema as a
serialised descriptor, though, so the module `etcd3.etcdrpc` is built here from it: the same message
classes, enum values and stubs, in a descriptor pool of their own that collides with nobody's.

`load()` is the only way by which elasticd imports `etcd3`.  It is not for trainers: gRPC and fork do
not go together.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
import threading
import types
from pathlib import Path
from typing import Any

from elasticd import extras

SUPPORTED_VERSION = "0.12.0"

# In the order in which they import each other.
_SCHEMA_FILES = ("kv", "auth", "rpc")
_RPC_MODULE = "etcd3.etcdrpc"
_lock = threading.Lock()


class EtcdClientMissing(ImportError):
    """The `etcd3` package is absent, or is not the one that this module knows."""


def _remedy() -> str:
    return f"install it with: {extras.install('daemon')} (it brings etcd3=={SUPPORTED_VERSION})"


def load() -> Any:
    """The `etcd3` package, ready to use. Raises EtcdClientMissing with the remedy."""
    with _lock:
        if _RPC_MODULE not in sys.modules:
            sys.modules[_RPC_MODULE] = _build_rpc_module(_package_folder())
        import etcd3

        return etcd3


def _package_folder() -> Path:
    try:
        version = importlib.metadata.version("etcd3")
        spec = importlib.util.find_spec("etcd3")
    except importlib.metadata.PackageNotFoundError:
        raise EtcdClientMissing(f"the package etcd3 is not installed; {_remedy()}") from None
    if version != SUPPORTED_VERSION:
        raise EtcdClientMissing(f"etcd3 {version} is installed, {SUPPORTED_VERSION} is needed; {_remedy()}")
    if spec is None or not spec.submodule_search_locations:
        raise EtcdClientMissing(f"the package etcd3 cannot be found by Python; {_remedy()}")
    return Path(spec.submodule_search_locations[0])


def _build_rpc_module(package: Path) -> types.ModuleType:
    from google.protobuf import (  # type: ignore[import-untyped, unused-ignore]
        descriptor_pb2,
        descriptor_pool,
        message_factory,
    )

    pool = descriptor_pool.DescriptorPool()
    files = []
    for name in _SCHEMA_FILES:
        schema = _embedded_schema(package / "etcdrpc" / f"{name}_pb2.py")
        pool.AddSerializedFile(schema)
        files.append(descriptor_pb2.FileDescriptorProto.FromString(schema))

    def message_class(full_name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(full_name.lstrip(".")))

    module = types.ModuleType(_RPC_MODULE, "etcd3's messages and stubs, built by elasticd.store.compat.")
    module.__path__ = []
    for file in files:
        for message in file.message_type:
            setattr(module, message.name, message_class(f"{file.package}.{message.name}"))
        for enum in file.enum_type:
            for value in enum.value:
                setattr(module, value.name, value.number)
        for service in file.service:
            setattr(module, f"{service.name}Stub", _stub_class(file.package, service, message_class))
    return module


def _embedded_schema(path: Path) -> bytes:
    """The bytes given as `serialized_pb=` in a generated file, read without running it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            # Written as b'...' or, for Python 2 as well, as _b('...'), which stands for latin-1.
            if isinstance(node.value, ast.Call):
                return bytes(ast.literal_eval(node.value.args[0]).encode("latin1"))
            return bytes(ast.literal_eval(node.value))
    raise EtcdClientMissing(f"{path} holds no descriptor: this is not etcd3 {SUPPORTED_VERSION}; {_remedy()}")


def _stub_class(package: str, service: Any, message_class: Any) -> type:
    """The class that protoc's gRPC plugin would generate: one attribute for each method, made on a channel."""
    methods = []
    for method in service.method:
        arity = f"{_arity(method.client_streaming)}_{_arity(method.server_streaming)}"
        path = f"/{package}.{service.name}/{method.name}"
        request, response = message_class(method.input_type), message_class(method.output_type)
        methods.append((method.name, arity, path, request.SerializeToString, response.FromString))

    def connect(self: Any, channel: Any) -> None:
        for name, arity, path, encode, decode in methods:
            make = getattr(channel, arity)
            setattr(self, name, make(path, request_serializer=encode, response_deserializer=decode))

    return type(f"{service.name}Stub", (), {"__init__": connect})


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"
