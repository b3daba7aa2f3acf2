"""Commands before a coordinator that asks for tokens: by the file, by the environment, and what they say."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.certificates import Authority
from tests.cli.support import call, refused
from tests.coordinator.secured import OPERATOR, VIEWER, private, secured, tokens


def test_commands_show_the_token_of_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELASTICD_TOKEN", raising=False)

    async def body() -> None:
        authority = Authority(tmp_path)
        pair = authority.server()
        section = msgspec.structs.replace(tokens(tmp_path), cert=pair.cert, key=pair.key)
        file = tmp_path / "elasticd.toml"
        own = private(tmp_path / "token", VIEWER)
        file.write_text(f'[security]\nca = "{authority.ca}"\ntoken_file = "{own}"\n')
        async with secured(section) as coordinator:
            named = ("--config", str(file), "--coordinator", coordinator.url)
            done = await asyncio.to_thread(call, "status", *named)
            assert done.exit_code == 0, done.output
            said = await asyncio.to_thread(refused, "drain", "alpha", *named)
            assert "role viewer may not do this: it needs a token of operator" in said
            monkeypatch.setenv("ELASTICD_TOKEN", OPERATOR)
            said = await asyncio.to_thread(refused, "drain", "alpha", *named)
            assert "there is no node 'alpha'" in said
            monkeypatch.setenv("ELASTICD_TOKEN", "nobody-0123456789abcdef")
            said = await asyncio.to_thread(refused, "status", *named)
            assert "this token or certificate is not known here: set $ELASTICD_TOKEN" in said
            assert "nobody-" not in said

    asyncio.run(body())


def test_url_with_a_password_in_it_is_refused() -> None:
    assert "is no URL" in refused("status", "--coordinator", "http://me:hush@127.0.0.1:1")


def test_secret_that_cannot_be_used_ends_in_one_message(tmp_path: Path) -> None:
    file = tmp_path / "elasticd.toml"
    file.write_text('[security]\ntoken_file = "/nowhere"\n')
    said = refused("status", "--config", str(file), "--coordinator", "http://127.0.0.1:1")
    assert "[security] token_file /nowhere cannot be read (No such file or directory)" in said
    file.write_text("[security]\nconnections = 0\n")
    assert "connections = 0 must be at least 1" in refused("status", "--config", str(file))
    file.write_text('[security]\nviewer = "x"\n')
    assert "[security] has no key 'viewer': did you mean 'viewers'?" in refused("status", "--config", str(file))
