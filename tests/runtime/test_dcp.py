"""Plain torch.distributed.checkpoint reads what elasticd wrote, bit by bit; torch is as the adapter assumes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from elasticd_planner.layout.layouts import Item
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from elasticd.checkpoints.checksums import ChecksumWriter
from elasticd.runtime.checkpoint.dcp_format import FormatChanged, _data, data_file, write_tensor
from tests.checkpoints.support import SPEC_OF_JOB, THREE, WHOLE, save, whole_values
from tests.migration.ranks import same_bits

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("dcp"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4, 5), (70_000, 3)], ids=str)
def test_a_tensor_lies_in_torchs_archive_where_the_record_says(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    with (tmp_path / "f").open("wb") as file:
        stream = ChecksumWriter(_Plain(file))
        stream.write(b"x" * 1234)
        records = [write_tensor(stream, "f", tensor) for _ in range(2)]
        stream.finish("f")
    data = (tmp_path / "f").read_bytes()
    raw = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    for record, at in records:
        assert data[at : at + len(raw)] == raw
        (tmp_path / "one").write_bytes(data[record.at : record.at + record.length])
        assert same_bits(torch.load(tmp_path / "one", weights_only=True), tensor)
    assert records[1][0].at == records[0][0].at + records[0][0].length


class _Plain:
    def __init__(self, file: object) -> None:
        self.write = file.write  # type: ignore[attr-defined]

    def sync(self) -> None: ...
    def close(self) -> None: ...


def test_another_archive_is_refused_and_not_misread() -> None:
    with pytest.raises(FormatChanged, match="data/0"):
        _data(bytearray(b"PK\x03\x04" + bytes(300)))


def test_torchs_private_parts_are_as_the_adapter_expects(tmp_path: Path) -> None:
    """What torch itself writes is what the adapter imitates: names of files, keys, places, versions."""
    ours = FileSystemReader(save(tmp_path / "ours")).read_metadata()
    state = {
        "model": {"w": torch.arange(6.0).reshape(2, 3)},
        "optimizer": {"param_groups": [{"lr": 1.0, "params": ["w"]}]},
    }
    dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    theirs = FileSystemReader(tmp_path / "torch").read_metadata()
    assert type(theirs) is type(ours)
    assert theirs.version == ours.version
    assert set(vars(theirs)) == set(vars(ours))
    assert {place.relative_path for place in theirs.storage_data.values()} == {data_file(0)}
    for there in (theirs, ours):
        assert all(type(place) is _StorageInfo for place in there.storage_data.values())
        for index in there.storage_data:
            assert (index.offset is not None) == isinstance(
                there.state_dict_metadata[index.fqn], TensorStorageMetadata
            )
    assert set(theirs.state_dict_metadata) == {
        "model.w",
        "optimizer.param_groups.0.lr",
        "optimizer.param_groups.0.params",
    }
    assert {"optimizer.param_groups.0.lr", "optimizer.param_groups.0.params"} <= set(ours.state_dict_metadata)
    assert (
        theirs.planner_data["optimizer.param_groups.0.lr"] == ours.planner_data["optimizer.param_groups.0.lr"]
    )


def test_dcp_load_fills_a_plain_state_dict_bit_by_bit(path: Path) -> None:
    model = {name: torch.zeros_like(value) for name, value in whole_values().items()}
    state = {"model": model, "elasticd": {"step": 0, "seed": 0}}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    for name, value in whole_values().items():
        assert same_bits(model[name], value), name
    assert state["elasticd"] == {"step": 42, "seed": SPEC_OF_JOB.seed}


WITHOUT = """
import sys, torch
for name in ("elasticd", "elasticd_planner", "elasticd_migration"):
    sys.modules[name] = None
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
"""


def test_torchs_own_converter_reads_all_of_it_without_elasticd(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.pt"
    subprocess.run([sys.executable, "-c", WITHOUT, str(path), str(out)], check=True, timeout=120)
    found = torch.load(out, weights_only=False)
    state, scalars = found["optimizer"]["state"], 0
    for name, _, parameter in WHOLE.owned:
        assert same_bits(found["model"][name], parameter.detach())
        for key, value in WHOLE.optimizer.state[parameter].items():
            assert same_bits(state[name][key], value), (name, key)
            scalars += not value.dim()
    assert scalars
    groups = found["optimizer"]["param_groups"]
    names = {id(parameter): name for name, _, parameter in WHOLE.owned}
    for group in WHOLE.optimizer.param_groups:
        mine = next(g for g in groups if names[id(group["params"][0])] in g["params"])
        assert sorted(mine["params"]) == sorted(names[id(p)] for p in group["params"])
        for key in ("lr", "betas", "eps", "weight_decay", "initial_lr"):
            assert mine[key] == group[key], key
    assert found["extras"]["scheduler"]["last_epoch"] == WHOLE.scheduler.state_dict()["last_epoch"]
    assert found["elasticd"]["step"] == 42
    assert Item("embed.tokens.weight", "value") in THREE.items


def test_plain_torch_trains_on_from_it(tmp_path: Path) -> None:
    """A module and an optimizer that know nothing of elasticd take the state by torch's own functions."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    path = save(tmp_path)
    module = torch.nn.Module()
    for name, _, parameter in WHOLE.owned:
        at = module
        *parents, leaf = name.split(".")
        for part in parents:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.register_parameter(leaf, torch.nn.Parameter(torch.zeros_like(parameter)))
    sources = {name: parameter for name, _, parameter in WHOLE.owned}
    by_name = dict(module.named_parameters())
    # Groups in the order in which elasticd wrote them, as any two programs must agree on their groups.
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    count = len({key.split(".")[2] for key in found if key.startswith("optimizer.param_groups.")})
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, tmp_path / "x.pt")
    groups = torch.load(tmp_path / "x.pt", weights_only=False)["optimizer"]["param_groups"]
    assert len(groups) == count == 2
    optimizer = torch.optim.AdamW([{"params": [by_name[name] for name in group["params"]]} for group in groups])
    state = {"model": dict(module.state_dict()), "optimizer": get_optimizer_state_dict(module, optimizer)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    module.load_state_dict(state["model"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"])
    reference = torch.optim.AdamW(
        [{"params": [p.detach().clone() for p in g["params"]]} for g in WHOLE.optimizer.param_groups]
    )
    reference.load_state_dict(WHOLE.optimizer.state_dict())
    names = {id(p): name for name, _, p in WHOLE.owned}
    expected = {
        names[id(old)]: new
        for mine, theirs in zip(reference.param_groups, WHOLE.optimizer.param_groups, strict=True)
        for new, old in zip(mine["params"], theirs["params"], strict=True)
    }
    for name, parameter in by_name.items():
        generator = torch.Generator().manual_seed(len(name))
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad, expected[name].grad = gradient, gradient.clone()
    optimizer.step()
    reference.step()
    for name, parameter in by_name.items():
        assert same_bits(parameter.detach(), expected[name].detach()), name
        assert not torch.equal(parameter, sources[name]), name
