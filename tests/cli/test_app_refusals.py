"""Wrong input that needs no cluster: each ends with one message that names it and says what is right."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.client import CannotReach, checked_url
from tests.cli.support import call, refused


@pytest.fixture
def dead() -> Iterator[str]:
    """host:port that nobody answers at, and that nobody else can take meanwhile."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


def test_version_is_that_of_the_package() -> None:
    assert "elasticd, version " in call("--version").output


def test_wrong_option_is_named() -> None:
    said = refused("status", "--colour")
    assert "No such option" in said
    assert "--colour" in said


def test_wrong_command_is_named() -> None:
    assert "No such command 'statos'" in refused("statos")


def test_unknown_key_of_the_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("[chaos]\nenabeld = true\n")
    said = refused("status", "--config", str(tmp_path / "e.toml"))
    assert "[chaos] has no key 'enabeld' (= True): did you mean 'enabled'?" in said


@pytest.mark.parametrize("command", [("status",), ("chaos", "recover", "n0/0")])
def test_etcd_that_is_not_there_is_named_with_the_remedy(
    command: tuple[str, ...], dead: str, tmp_path: Path
) -> None:
    (tmp_path / "e.toml").write_text(f'[etcd]\nendpoints = ["{dead}"]\n')
    said = refused(*command, "--config", str(tmp_path / "e.toml"))
    assert f"no etcd answers at {dead}" in said
    assert "start one there" in said


def test_coordinator_without_etcd_ends_with_one_message(dead: str, capfd: pytest.CaptureFixture[str]) -> None:
    done = call("coordinator", "--etcd", dead, "--port", "0")
    assert done.exit_code == 1
    assert f"no etcd answers at {dead}" in done.output + capfd.readouterr().err


def test_coordinator_that_does_not_answer_is_named(dead: str) -> None:
    said = refused("status", "--coordinator", f"http://{dead}")
    assert f"no coordinator answers at http://{dead}" in said
    assert "elasticd coordinator" in said


@pytest.mark.parametrize("url", ["127.0.0.1:7471", "", "http://", "ftp://a:1", "http://a:port", "http://a:0"])
def test_url_that_is_none_is_shown_a_right_one(url: str) -> None:
    with pytest.raises(CannotReach, match=r"write it as http://127\.0\.0\.1:7471"):
        checked_url(url)


def test_answer_of_another_program_is_not_taken_for_a_coordinators(tmp_path: Path) -> None:
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said = refused("status", "--coordinator", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert "is that an elasticd coordinator?" in said


def test_demo_refuses_a_story_that_cannot_fit() -> None:
    assert "--steps 5 is too few for the demo" in refused("demo", "--steps", "5")


def test_demo_refuses_a_folder_that_it_cannot_write_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refused("demo", "--out", str(tmp_path / "file"))
    assert "cannot write the report" in said
    assert "--out" in said
