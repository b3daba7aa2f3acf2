"""`elasticd checkpoint`: lists, verifies and exports real checkpoints, and names what is damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from elasticd.checkpoints import export as exporting
from elasticd.checkpoints.export import CannotExport, export
from elasticd.checkpoints.folder import look
from tests.checkpoints.support import WHOLE, save, whole_values
from tests.cli.support import call, refused
from tests.migration.ranks import same_bits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    for step in (10, 20):
        save(folder, step=step)
    return folder


def newest(folder: Path) -> Path:
    return folder / "step-00000020.plan-7.aa"


def damage(path: Path) -> None:
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[-9] ^= 1
    (path / "__0_0.distcp").write_bytes(data)


def test_list_shows_the_newest_first_and_what_is_damaged(folder: Path) -> None:
    (folder / "step-00000010.plan-7.aa" / ".metadata").unlink()
    lines = call("checkpoint", "list", str(folder)).output
    assert f"{newest(folder).name}    20" in lines
    assert f"damaged: {folder}/step-00000010.plan-7.aa/.metadata: No such file" in lines
    told = msgspec.json.decode(call("checkpoint", "list", str(folder), "--json").output)
    assert [one["step"] for one in told] == [20, 10]
    assert told[0]["damage"] == ""
    assert told[0]["origin"]["binding"] == {"n0/0": "aa", "n0/1": "bb", "n1/0": "cc", "n1/1": "dd"}
    assert ".metadata" in told[1]["damage"]


def test_an_empty_folder_is_said_to_be_one(tmp_path: Path) -> None:
    assert "no checkpoint in" in call("checkpoint", "list", str(tmp_path)).output
    assert "no checkpoint in" in refused("checkpoint", "verify", str(tmp_path))
    assert "does not exist" in refused("checkpoint", "list", str(tmp_path / "nowhere"))


def test_verify_reads_every_byte_of_one_or_of_all(folder: Path) -> None:
    done = call("checkpoint", "verify", str(folder))
    assert done.exit_code == 0
    assert done.output.count(": sound") == 2
    damage(newest(folder))
    said = refused("checkpoint", "verify", str(folder))
    assert "step-00000020.plan-7.aa: damaged" in said
    assert "__0_0.distcp: bytes 0 to" in said
    assert "1 of 2 damaged" in said
    done = call("checkpoint", "verify", "--json", str(folder))
    assert done.exit_code == 1
    told = msgspec.json.decode(done.stdout)
    assert told["step-00000010.plan-7.aa"] == []
    assert "__0_0.distcp: bytes 0 to" in told[newest(folder).name][0]
    assert "1 of 1 damaged" in refused("checkpoint", "verify", str(newest(folder)))
    assert call("checkpoint", "verify", str(folder / "step-00000010.plan-7.aa")).exit_code == 0


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("piece", [1 << 26, 1000], ids=["whole", "in slabs"])
def test_export_is_what_safetensors_reads_bit_by_bit(
    folder: Path, tmp_path: Path, moments: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "PIECE_BYTES", piece)
    out = tmp_path / "out.safetensors"
    done = call("checkpoint", "export", str(newest(folder)), str(out), *(["--moments"] if moments else []))
    assert done.exit_code == 0, done.output
    found = load_file(out)
    expected = whole_values()
    if moments:
        for name, _, parameter in WHOLE.owned:
            for key, value in WHOLE.optimizer.state[parameter].items():
                if value.shape == parameter.shape and key != "step":
                    expected[f"optimizer.state.{name}.{key}"] = value
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert same_bits(found[name], value), name
    with safe_open(out, "pt") as file:
        assert file.metadata()["step"] == "20"
    assert not list(tmp_path.glob("*.part"))


def test_a_module_of_a_model_of_one_is_refused(folder: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    said = refused("checkpoint", "export", str(newest(folder)), out, "--module", "vision")
    assert "has one module: leave --module vision out" in said
    said = refused("checkpoint", "export", str(newest(folder)), "--hf", out, "--module", "vision")
    assert "--hf DIR writes the whole model: leave --module vision out" in said


def test_export_of_a_damaged_checkpoint_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    damage(newest(folder))
    out = tmp_path / "out.safetensors"
    assert "__0_0.distcp" in refused("checkpoint", "export", str(newest(folder)), str(out))
    assert not list(tmp_path.glob("out*"))


def test_a_dtype_without_a_name_in_the_format_is_refused(folder: Path, tmp_path: Path) -> None:
    manifest = look(newest(folder)).manifest
    assert manifest is not None
    entry = manifest.tensors["value"]["embed.tokens.weight"]
    odd = msgspec.structs.replace(entry, planes=(msgspec.structs.replace(entry.planes[0], dtype="complex128"),))
    manifest.tensors["value"]["embed.tokens.weight"] = odd
    with pytest.raises(CannotExport, match="complex128"):
        export(newest(folder), manifest, tmp_path / "x")


def test_the_commands_need_no_torch(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from elasticd.cli.app import elasticd\n"
        "elasticd(sys.argv[1:], prog_name='elasticd')"
    )
    for arguments in (
        ["list", str(folder)],
        ["verify", str(folder)],
        ["export", str(newest(folder)), str(tmp_path / "x.safetensors")],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, "checkpoint", *arguments], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    assert torch.is_tensor(load_file(tmp_path / "x.safetensors")["embed.tokens.weight"])
