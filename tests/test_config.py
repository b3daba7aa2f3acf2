"""One TOML file into frozen values; whatever is wrong ends in a message that names it and helps."""

from pathlib import Path

import msgspec
import pytest
from elasticd_planner.spec.cluster import Level, Link

from elasticd.config import tree
from elasticd.config.tree import Config, ConfigError
from elasticd.coordinator.daemon import settings_of


def test_defaults_hold_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTICD_CONFIG", raising=False)
    read = tree.load()
    assert read == Config()
    assert read.etcd.endpoints == ("127.0.0.1:2379",)
    assert not read.chaos.enabled
    assert not read.emulate.enabled


def test_file_is_read_and_the_rest_stays_default(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text(
        '[cluster]\nname = "c"\n[etcd]\nendpoints = ["a:1", "b:2"]\n[agent]\nnode = "alpha"\ndevices = 2\n'
        '[emulate]\nenabled = true\nforward = 2e-4\nbackward = 4e-4\nmemory = "3 MiB"\n'
        "[chaos]\nenabled = true\n"
    )
    read = tree.load(path)
    assert read.cluster.name == "c"
    assert read.etcd.endpoints == ("a:1", "b:2")
    assert (read.agent.node, read.agent.devices, read.agent.listens) == ("alpha", 2, "127.0.0.1")
    assert read.emulate.memory == 3 * 1024 * 1024
    assert read.coordinator == Config().coordinator


def test_environment_names_the_file_and_the_option_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f'[cluster]\nname = "{name}"\n')
    monkeypatch.setenv("ELASTICD_CONFIG", str(tmp_path / "one"))
    assert tree.load().cluster.name == "one"
    assert tree.load(tmp_path / "two").cluster.name == "two"


def test_file_that_is_not_there_is_named_with_who_named_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICD_CONFIG", str(tmp_path / "gone.toml"))
    with pytest.raises(ConfigError, match=r"gone\.toml \(named by ELASTICD_CONFIG\): No such file"):
        tree.load()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[agent]\nnod = 'a'", ["f.toml", "[agent]", "'nod'", "'a'", "did you mean 'node'"]),
        ("[agents]\nnode = 'a'", ["no section [agents]", "did you mean 'agent'"]),
        ("[zzz]\n", ["no section [zzz]", "agent", "coordinator"]),
        ("[agent]\nxyzzy = 1", ["'xyzzy'", "may be one of", "address, devices"]),
        ("agent = 3", ["agent = 3", "write [agent]"]),
        ("[agent]\ndevices = 'four'", ["[agent] devices = 'four'", "expected int, got str"]),
        ("[agent]\ndevices = 0", ["devices = 0", "at least 1"]),
        ("[agent]\nmemory = true", ["memory = True", "expected int"]),
        ("[agent]\nmemory = '3 MiX'", ["'3 MiX' is not a size", "MiB"]),
        ("[agent]\nsnapshot_mib = -1", ["snapshot_mib = -1", "0 to keep none"]),
        ("[agent]\nnode = 'a/b'", ["node 'a/b' cannot be used", "letters, digits"]),
        ("[coordinator]\nport = 70000", ["port = 70000", "between 0 and 65535"]),
        ("[etcd]\nendpoints = 'a:1'", ["endpoints = 'a:1'", "expected array"]),
        ("[etcd]\nendpoints = ['a']", ["'a' is not host:port"]),
        ("[etcd]\nendpoints = []", ["at least one etcd"]),
        ("[emulate]\nenabled = true", ["needs forward and backward"]),
        ("[emulate]\nforward = 1e-3", ["forward and backward go together"]),
        ("[emulate]\nforward = -1.0\nbackward = 1.0", ["forward = -1.0", "seconds that one token takes"]),
        ("[chaos]\nenabled = 1", ["[chaos] enabled = 1", "expected bool"]),
        ("[planner]\nflops = 0", ["[planner]", "flops = 0", "operations a second", "as 1.5e14"]),
        ("[planner]\nflops = inf", ["flops = inf", "as 1.5e14"]),
        ("[planner]\nmemory_bandwidth = -1", ["memory_bandwidth = -1", "as 2e12", "0 where it is not known"]),
        ("[planner]\nflop = 1e12", ["no key 'flop'", "did you mean 'flops'"]),
        ("[planner]\ninside = 1e9", ["[planner] inside = 1000000000.0", "write a table"]),
        (
            "[planner]\ninside = {bandwith = 1e9}",
            ["[planner.inside]", "'bandwith'", "did you mean 'bandwidth'"],
        ),
        ("[planner.between]\nbandwidth = 0", ["[planner.between]", "bandwidth = 0", "as 25e9"]),
        ("[planner.between]\nbandwidth = '25 parsecs/s'", ["'25 parsecs' is not a size"]),
        ("[planner.between]\nbandwidth = '25 GB'", ["bandwidth = '25 GB'", "expected float"]),
        ("[planner.between]\nlatency = -1e-5", ["latency = -1e-05", "seconds of one hop", "as 2e-5"]),
        ("[planner]\nlevels = 3", ["[planner] levels = 3", "write a table [[planner.levels]]"]),
        ("[[planner.levels]]\nname = 'rack'", ["[planner.levels]", "needs nodes"]),
        ("[[planner.levels]]\nname = 'rack'\nnodez = []", ["no key 'nodez'", "did you mean 'nodes'"]),
        ("[[planner.levels]]\nname = 'rack'\nnodes = [['a', 'a']]", ["[planner.levels]", "a is named twice"]),
        ("[[planner.levels]]\nname = 'node'\nnodes = []", ["[planner.levels]", "level 'node'"]),
        (
            "[[planner.levels]]\nname = 'rack'\nnodes = [['a', 'b']]\n"
            "[[planner.levels]]\nname = 'pod'\nnodes = [['a']]",
            ["[planner]", "a, b", "rack", "pod"],
        ),
        ("[cluster\n", ["f.toml is not TOML", "line 1"]),
    ],
)
def test_wrong_configuration_is_refused_with_what_would_be_right(text: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        tree.parse(text, "f.toml")
    assert "f.toml" in str(caught.value)
    assert [part for part in said if part not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("section", ["detect", "policy"])
def test_planners_settings_are_sections_of_their_own(section: str) -> None:
    name = msgspec.structs.fields(getattr(Config(), section))[0].name
    with pytest.raises(ConfigError, match=f"did you mean '{name}'"):
        tree.parse(f"[{section}]\n{name}x = 1", "f.toml")


def test_a_key_is_taken_by_its_name_of_earlier_releases_with_a_line_that_says_the_new_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read = tree.parse("[detect]\nquickest = 4\nsettle = 12", "f.toml").detect
    assert (read.min_steps, read.refine_after_steps) == (4, 12)
    assert "f.toml: [detect] quickest is called min_steps now" in caplog.text
    assert msgspec.json.decode(msgspec.json.encode(read))["quickest"] == 4, "stored names stay"
    with pytest.raises(ConfigError, match="quickest and min_steps are one key"):
        tree.parse("[detect]\nquickest = 4\nmin_steps = 4", "f.toml")


def test_devices_and_links_are_read_with_their_units() -> None:
    text = """[planner]
flops = 1.5e14
inside = { bandwidth = "200 GB/s", latency = 1e-5 }
[planner.between]
bandwidth = 25e9
"""
    read = tree.parse(text, "f.toml").planner
    assert read.flops == 1.5e14
    assert read.inside.link == Link(bandwidth=2e11, latency=1e-5)
    assert read.between.link == Link(bandwidth=2.5e10)
    assert Config().planner.inside.link == Link(), "the defaults are the planner's own"


def test_levels_of_links_reach_the_leaders_planner() -> None:
    text = (
        "[[planner.levels]]\nname = 'rack'\nbandwidth = '50 GB/s'\nlatency = 5e-6\nnodes = [['a', 'b'], ['c']]"
    )
    settings = settings_of(tree.parse(text, "f.toml"))
    link = Link(bandwidth=50e9, latency=5e-6)
    assert settings.levels == (Level(name="rack", link=link, groups=(("a", "b"), ("c",))),)
    assert settings_of(Config()).levels == ()


def test_emulated_times_are_known_to_no_section_of_the_planners() -> None:
    for section in ("detect", "policy", "planner"):
        names = {field.name for field in msgspec.structs.fields(getattr(Config(), section))}
        assert not names & {"forward", "backward"}


def test_command_line_goes_over_the_file_and_none_leaves_it() -> None:
    read = tree.parse("[agent]\nnode = 'a'\ndevices = 2\naddress = '::1'", "f.toml")
    options = {"agent.node": "b", "agent.devices": "3", "agent.memory": "1 GiB", "agent.address": None}
    changed = tree.with_overrides(read, {**options, "etcd.endpoints": "x:1, y:2"})
    assert (changed.agent.node, changed.agent.devices, changed.agent.address) == ("b", 3, "::1")
    assert changed.agent.memory == 1 << 30
    assert changed.etcd.endpoints == ("x:1", "y:2")
    assert read.agent.node == "a"


def test_wrong_option_meets_the_same_checks() -> None:
    with pytest.raises(ConfigError, match=r"the command line.*devices = 0 must be at least 1"):
        tree.with_overrides(Config(), {"agent.devices": 0})
    with pytest.raises(ConfigError, match=r"the command line: \[agent\] devices = 'x'"):
        tree.with_overrides(Config(), {"agent.devices": "x"})


def test_option_that_no_section_has_is_an_error_of_the_program() -> None:
    with pytest.raises(KeyError):
        tree.with_overrides(Config(), {"agent.nod": "a"})


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("1024", 1024), ("3 MiB", 3 << 20), ("1.5GiB", 3 << 29), ("2kB", 2000), ("8 gib", 8 << 30)],
)
def test_sizes_read_as_written(text: str, bytes_: int) -> None:
    assert tree.size(text) == bytes_


def test_values_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().agent.node = "x"  # type: ignore[misc]
