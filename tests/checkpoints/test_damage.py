"""What is truncated, changed or missing is named and refused, wherever the damage lies."""

import shutil
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.checkpoints.checksums import BLOCK_BYTES, ChecksumReader, ChecksumWriter, Damaged
from elasticd.checkpoints.disk import LocalDisk
from elasticd.checkpoints.folder import (
    UNFINISHED,
    damages,
    look,
    next_serial,
    remove,
    scan,
    sound,
    superfluous,
    tidy,
)
from elasticd.checkpoints.manifest import MANIFEST, METADATA, VERSION, Part, merge, seal
from elasticd.runtime.checkpoint.loader import load
from elasticd.runtime.checkpoint.writer import origin_of
from elasticd.version import __version__
from tests.checkpoints.support import ONE, SPEC_OF_JOB, THREE, save
from tests.sizes import examples


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


FILES = ["__0_0.distcp", "__3_0.distcp", "__4_0.distcp", METADATA, MANIFEST]


def test_a_sound_checkpoint_is_sound(whole: Path) -> None:
    assert damages(whole) == ()
    assert scan(whole.parent)[0].manifest is not None
    assert {path.name for path in whole.iterdir()} > set(FILES)
    assert not list(whole.glob("part-*")), "what the manifest took in is not kept twice"


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named_at_first_sight(copy: Path, name: str) -> None:
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[:-1])
    assert name in look(copy).damage
    assert any(name in line for line in damages(copy))


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_at_first_sight(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert name in look(copy).damage


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0.0, 0.37, 1.0])
def test_one_changed_bit_is_found(copy: Path, name: str, where: float) -> None:
    data = bytearray((copy / name).read_bytes())
    data[round(where * (len(data) - 1))] ^= 4
    (copy / name).write_bytes(data)
    assert any(name in line for line in damages(copy))


def test_a_load_that_reads_a_damaged_block_names_the_file(copy: Path) -> None:
    found = look(copy).manifest
    assert found is not None
    chunk = next(
        chunk for plane in found.tensors["value"]["embed.tokens.weight"].planes for chunk in plane.chunks
    )
    data = bytearray((copy / chunk.record.file).read_bytes())
    data[chunk.data + 5] ^= 1
    (copy / chunk.record.file).write_bytes(data)
    assert not look(copy).damage, "the sizes are right"
    with pytest.raises(Damaged, match=chunk.record.file):
        load(copy, found, ONE.held("n0/0"))


@settings(max_examples=examples(60))
@given(
    pieces=st.lists(st.integers(0, 3 * BLOCK_BYTES // 2), min_size=1, max_size=5),
    reads=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=5),
)
def test_blocks_are_read_as_they_were_written(
    pieces: list[int], reads: list[tuple[float, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sums")
    data = torch.randint(0, 256, (sum(pieces),), dtype=torch.uint8).numpy().tobytes()
    stream = ChecksumWriter(LocalDisk().create(folder / "f"))
    at = 0
    for size in pieces:
        assert stream.mark() == at
        stream.write(data[at : at + size])
        assert bytes(stream.head) == data[at : at + min(size, ChecksumWriter.HEAD)]
        at += size
    sums = stream.finish("f")
    assert sums.size == len(data) == (folder / "f").stat().st_size
    with closing(ChecksumReader(folder, sums)) as file:
        for a, b in reads:
            start, stop = sorted((int(a * len(data)), int(b * len(data))))
            assert file.read(start, stop) == data[start:stop]
        file.test()


def test_the_newest_is_the_one_that_was_written_last_also_when_steps_were_gone_back(tmp_path: Path) -> None:
    for step in (10, 20, 15):
        save(tmp_path, step=step)
    assert [item.step for item in scan(tmp_path)] == [15, 20, 10]
    assert next_serial(scan(tmp_path)) == 4


def test_retention_keeps_the_newest_and_every_nth_and_never_counts_a_damaged_one(tmp_path: Path) -> None:
    paths = {step: save(tmp_path, step=step) for step in (10, 20, 30, 40, 50)}
    (paths[50] / METADATA).unlink()
    assert [item.step for item in superfluous(scan(tmp_path), 2, None)] == [20, 10]
    assert [item.step for item in superfluous(scan(tmp_path), 1, 20)] == [30, 10]
    assert superfluous(scan(tmp_path), 9, None) == ()
    (paths[40] / METADATA).unlink()
    (paths[30] / METADATA).unlink()
    (paths[20] / METADATA).unlink()
    assert superfluous(scan(tmp_path), 1, None) == (), "the only one that is sound stays"
    remove(LocalDisk(), scan(tmp_path)[-1])
    assert [item.step for item in sound(scan(tmp_path))] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        paths[step].name for step in (20, 30, 40, 50)
    )


def test_what_is_left_half_written_or_half_removed_is_no_checkpoint_and_is_tidied(tmp_path: Path) -> None:
    path = save(tmp_path)
    for suffix in (UNFINISHED, ".removed"):
        shutil.copytree(path, path.with_name(path.name + suffix))
    (tmp_path / "mine.tmp").mkdir()
    assert [item.name for item in scan(tmp_path)] == [path.name]
    assert len(tidy(LocalDisk(), tmp_path)) == 2
    assert {item.name for item in tmp_path.iterdir()} == {path.name, "mine.tmp"}
    assert damages(path) == ()


def test_a_manifest_of_a_far_version_is_refused_with_both_and_the_remedy(copy: Path) -> None:
    found = look(copy).manifest
    assert found is not None
    told = msgspec.json.decode(msgspec.json.encode(found))
    told["version"] = VERSION + 1
    (copy / MANIFEST).write_bytes(seal(told))
    assert look(copy).damage == ""  # of the next release
    told["version"] = VERSION + 2
    (copy / MANIFEST).write_bytes(seal(told))
    refusal = f"has version {VERSION + 2}, and elasticd {__version__} here knows version {VERSION}"
    assert refusal in look(copy).damage
    assert "install the same release" in look(copy).damage


def test_a_whole_has_every_rank_in_it(tmp_path: Path) -> None:
    """A part that says that it wrote less than it should leaves no checkpoint."""
    found = look(save(tmp_path)).manifest
    assert found is not None
    entry = found.tensors["value"]["embed.tokens.weight"]
    less = msgspec.structs.replace(
        entry, planes=(msgspec.structs.replace(entry.planes[0], chunks=entry.planes[0].chunks[1:]),)
    )
    tensors = {**found.tensors, "value": {**found.tensors["value"], "embed.tokens.weight": less}}
    part = Part(device="n0/0", tensors=tensors, files=())
    with pytest.raises(ValueError, match=r"embed\.tokens\.weight.*elements were written"):
        merge(origin_of(SPEC_OF_JOB, THREE.plan, 1), 1, [part])
