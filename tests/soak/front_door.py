"""The coordinator's own HTTP application, asked without a socket."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Message

from elasticd.coordinator.auth import Authorizer
from elasticd.coordinator.commands import Commands
from elasticd.coordinator.http.app import application
from elasticd.coordinator.http.response_encoder import Viewers
from elasticd.coordinator.leader import Leader
from elasticd.coordinator.live_feed import FeedSource
from elasticd.records import HistoryRecord
from elasticd.wire.api_types import ClusterStatus

#: Requests a second of an address: no user here is turned away for asking often.
OFTEN = 1e9


class FrontDoor:
    """One leader's, as its port would serve it. What needs the daemon around the leader is not served."""

    def __init__(self, leading: Leader) -> None:
        self.leading, self.commands = leading, Commands(leading)
        self.access, self.viewers = Authorizer({}, asks=False), Viewers()
        self._app = application(self, OFTEN)

    async def post(self, path: str, body: object) -> tuple[int, str]:
        """The status of the answer, and its text where it is a refusal."""
        waiting: list[Message] = [{"type": "http.request", "body": msgspec.json.encode(body)}]
        answer: list[Message] = []

        async def receive() -> Message:
            return waiting.pop(0) if waiting else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            answer.append(message)

        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 7471),
        }
        await self._app(scope, receive, send)
        content = b"".join(message.get("body", b"") for message in answer)
        return int(answer[0]["status"]), msgspec.json.decode(content).get("error", "")

    async def status(self) -> ClusterStatus:
        raise NotImplementedError

    async def history(self, job: str, after: int) -> list[HistoryRecord]:
        raise NotImplementedError

    def listening(self) -> FeedSource:
        raise NotImplementedError

    def ready(self) -> str:
        return ""
