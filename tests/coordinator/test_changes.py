"""The configuration changed while running: checked, kept over leaders, followed, refused with a reason."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from elasticd_planner.policy.policy import PolicySettings

from elasticd.codec import decoding
from elasticd.config.tree import Config, ConfigError, parse, reloaded
from elasticd.coordinator.daemon import Coordinator
from elasticd.coordinator.live_config import MOST_HISTORY, ConfigChanges, of
from elasticd.records import Keys, encode
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import Put
from tests.coordinator.agents import config, coordinating, get, post


def changes(text: str = "") -> ConfigChanges:
    found = parse(text, "test.toml")
    return ConfigChanges(detect=found.detect, policy=found.policy)


async def change(coordinator: Coordinator, **values: Any) -> tuple[int, dict[str, Any]]:
    asked = {key.replace("__", "."): value for key, value in values.items()}
    return await post(coordinator, "/v1/config", {"values": asked, "by": "me@here"})


def policy(coordinator: Coordinator) -> PolicySettings:
    return coordinator.leading.state.settings.policy


def test_a_change_is_followed_kept_and_found_by_the_next_leader() -> None:
    async def body() -> None:
        server = MemoryServer()
        async with coordinating(server) as coordinator:
            status, shown = await change(coordinator, policy__horizon_steps="50", policy__paused=True)
            assert status == 200
            assert shown["values"]["policy.horizon_steps"] == 50
            assert (policy(coordinator).horizon_steps, policy(coordinator).paused) == (50, True)
            assert (await change(coordinator, policy__paused=None))[0] == 200
            assert not policy(coordinator).paused
            _, told = await get(coordinator, "/v1/events")
            texts = [event["text"] for event in told["events"] if event["kind"] == "configured"]
            assert "policy.horizon_steps = 50" in texts[0]
            assert texts[1] == "configuration changed by me@here: policy.paused is the file's again"
        async with coordinating(server) as coordinator:
            assert (policy(coordinator).horizon_steps, policy(coordinator).paused) == (50, False)
            _, shown = await get(coordinator, "/v1/config")
            assert [record["number"] for record in shown["history"]] == [1, 2]
            assert shown["changed"] == {"policy.horizon_steps": "50"}
            assert (await change(coordinator, policy__horizon_steps=60))[0] == 200, "its revisions are known"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"policy.horizon_steps": 0}, "horizon_steps must be from 1"),
        ({"policy.horizon_steps": "many"}, "expected `int`"),
        ({"policy.horizon": 5}, "did you mean 'horizon_steps'?"),
        ({"agent.devices": 5}, "cannot be changed while running"),
        ({"paused": True}, "cannot be changed while running"),
        ({"policy.paused": None}, "nothing to change"),
        ({}, "nothing to change"),
    ],
)
def test_what_is_wrong_is_refused_with_the_reason_and_changes_nothing(
    values: dict[str, Any], reason: str
) -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            before = coordinator.leading.state.settings
            status, said = await post(coordinator, "/v1/config", {"values": values, "by": "me"})
            assert status == 400
            assert reason.replace("`", "") in said["error"].replace("`", "")
            assert coordinator.leading.state.settings == before
            assert coordinator.leading.changes.history == ()

    asyncio.run(body())


def test_a_renamed_key_is_stored_under_its_first_name_and_taken_by_both() -> None:
    known = changes()
    known = known.changed({"detect.quickest": 4}, 1.0, "me").changed({"detect.min_steps": 5}, 2.0, "me")
    assert known.history[-1].values == {"detect.quickest": 5}
    assert known.values == {"detect.min_steps": 5}
    assert known.effective()[0].min_steps == 5
    shown = known.shown()
    assert shown.history[0].values == {"detect.min_steps": 4}
    assert (shown.values["detect.min_steps"], shown.changed) == (5, {"detect.min_steps": 5})
    with pytest.raises(ConfigError, match=r"quickest and detect\.min_steps are one key"):
        known.changed({"detect.quickest": 6, "detect.min_steps": 7}, 3.0, "me")


def test_a_file_that_is_read_anew_lies_under_what_was_changed() -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            await change(coordinator, policy__horizon_steps=50)
            again = parse("[policy]\nhorizon_steps = 70\nminimum_saving = 0.5\n[chaos]\nenabled = false", "t")
            coordinator.reconfigure(again)
            assert (policy(coordinator).horizon_steps, policy(coordinator).minimum_saving) == (50, 0.5)
            asked = {"action": "slow", "device": "alpha/0", "factor": 2}
            assert (await post(coordinator, "/v1/chaos", asked))[0] == 403
            await change(coordinator, policy__horizon_steps=None)
            assert policy(coordinator).horizon_steps == 70

    asyncio.run(body())


def test_a_stored_key_that_this_release_lacks_is_skipped_once_and_kept(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_logged", set())
    made = changes().changed({"policy.paused": True}, 1.0, "me").history[0]
    newer = {"policy.gone": 1, "quota.share": 0.5}
    record = msgspec.structs.replace(made, values={**made.values, **newer})
    store, keys = MemoryStore(MemoryServer()), Keys(cluster="test")
    store.transact((), (Put(keys.config_history(1), encode(record)),))
    before = decoding.skipped()["setting"]
    found = of(config(), keys, store.snapshot(keys.config).items)
    assert decoding.skipped()["setting"] > before
    assert found.effective()[1].paused
    changed = found.changed({"policy.horizon_steps": 60}, 2.0, "me")
    assert changed.values == {"policy.paused": True, "policy.horizon_steps": 60, **newer}
    assert (changed.effective()[1].horizon_steps, changed.shown().changed) == (60, changed.values)
    with pytest.raises(ConfigError, match="has no key 'gone'"):
        found.changed({"policy.gone": 2}, 2.0, "me")
    said = [line.getMessage() for line in caplog.records if "configuration in the store" in line.getMessage()]
    assert sorted("quota.share" in line for line in said) == [False, True]
    store.close()


def test_a_record_that_cannot_be_used_is_named_with_its_keys() -> None:
    made = changes().changed({"policy.paused": True}, 1.0, "me").history[0]
    spoilt = msgspec.structs.replace(made, values={"policy.horizon_steps": 0})
    store, keys = MemoryStore(MemoryServer()), Keys(cluster="test")
    store.transact((), (Put(keys.config_history(1), encode(spoilt)),))
    with pytest.raises(
        ConfigError, match=r"under /elasticd/test/config in etcd.*horizon_steps must be.*delete these"
    ):
        of(config(), keys, store.snapshot(keys.config).items)
    store.close()


def test_history_is_bounded_in_the_leader_and_in_the_store() -> None:
    async def body() -> None:
        server = MemoryServer()
        async with coordinating(server) as coordinator:
            for number in range(1, MOST_HISTORY + 4):
                await coordinator.commands.change({"policy.horizon_steps": number}, "me", lambda: None)
            kept = [record.number for record in coordinator.leading.changes.history]
            store = MemoryStore(server)
            found = store.snapshot(f"{coordinator.keys.config}-history/").items
            store.close()
        assert kept == list(range(4, MOST_HISTORY + 4))
        assert [item.key[-8:] for item in found] == [f"{number:08d}" for number in kept]

    asyncio.run(body())


def test_only_the_named_sections_of_a_file_hold_at_once(caplog: pytest.LogCaptureFixture) -> None:
    before = Config()
    text = "[policy]\nhorizon_steps = 7\n[coordinator]\nport = 99\n"
    with caplog.at_level("INFO"):
        after = reloaded(before, lambda: parse(text, "e.toml"), ("detect", "policy"))
    assert after.policy.horizon_steps == 7
    assert after.coordinator == before.coordinator
    assert "[coordinator] has changed too, and holds from the next start on" in caplog.text


def test_a_file_that_is_wrong_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = Config()
    assert reloaded(before, lambda: parse("[policy]\nhorizon_steps = 0", "e.toml"), ("policy",)) == before
    assert "the configuration stays as it is: e.toml: [policy]" in caplog.text
