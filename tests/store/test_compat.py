"""The shim around the etcd3 package: complete as we use it, and loud when the package changes."""

from __future__ import annotations

import importlib.metadata

import pytest

from elasticd.store import compat


def test_the_installed_package_is_the_one_the_shim_knows():
    assert importlib.metadata.version("etcd3") == compat.SUPPORTED_VERSION


def test_loading_twice_gives_the_same_package():
    assert compat.load() is compat.load()


def test_every_message_and_stub_that_the_session_uses_is_there():
    rpc = compat.load().etcdrpc
    request = rpc.TxnRequest(
        compare=[rpc.Compare(key=b"k", target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=7)],
        success=[rpc.RequestOp(request_put=rpc.PutRequest(key=b"k", value=b"v", lease=3))],
        failure=[rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=b"k"))],
    )
    assert rpc.TxnRequest.FromString(request.SerializeToString()) == request
    assert {"MOD", "VALUE", "CREATE"} <= set(rpc.Compare.CompareTarget.keys())
    for stub in ("KV", "Watch", "Lease", "Auth", "Cluster", "Maintenance"):
        assert hasattr(rpc, f"{stub}Stub")


def test_a_stub_has_a_method_of_the_right_arity_for_each_call():
    made = []

    class Channel:
        def __getattr__(self, arity):
            return lambda path, **codecs: made.append((arity, path))

    compat.load().etcdrpc.LeaseStub(Channel())
    compat.load().etcdrpc.WatchStub(Channel())
    assert ("unary_unary", "/etcdserverpb.Lease/LeaseGrant") in made
    assert ("stream_stream", "/etcdserverpb.Lease/LeaseKeepAlive") in made
    assert ("stream_stream", "/etcdserverpb.Watch/Watch") in made


@pytest.mark.parametrize("found", ["0.13.0", None])
def test_another_version_or_none_is_refused_with_the_remedy(monkeypatch, found):
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(compat.importlib.metadata, "version", version)
    with pytest.raises(compat.EtcdClientMissing, match=r"pip install .*\[daemon\]"):
        compat._package_folder()


def test_a_package_without_its_schema_is_refused(tmp_path):
    (tmp_path / "kv_pb2.py").write_text("DESCRIPTOR = None\n")
    with pytest.raises(compat.EtcdClientMissing, match="holds no descriptor"):
        compat._embedded_schema(tmp_path / "kv_pb2.py")
