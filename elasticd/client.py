"""Client of the leading coordinator, for commands: find its URL, ask it, and say plainly what is missing."""

from __future__ import annotations

import getpass
import os
import platform
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from elasticd.backoff import Backoff
from elasticd.codec.decoding import MessageDecoder, decoded_as
from elasticd.codec.safe_text import for_terminal, json_for_terminal
from elasticd.config.credentials import Credentials, credentials
from elasticd.config.security import SecuritySection
from elasticd.config.tree import Config, load
from elasticd.local_cluster import settings as settings_of
from elasticd.records import AnyHistoryRecord, JobSpec, Keys
from elasticd.store.configured import etcd_options
from elasticd.store.etcd import EtcdStore
from elasticd.store.leader import ElectedLeader, read_leader
from elasticd.store.protocol import Store, StoreError, StoreRefused
from elasticd.system.logs import say
from elasticd.wire.api_types import (
    USER_HEADER,
    CallerStatus,
    ClusterStatus,
    Events,
    Harming,
    History,
    OutputText,
    Settings,
    Steps,
    Stopping,
)
from elasticd.wire.event_record import EventRecord
from elasticd.wire.live_types import LINES, AnyNews

#: Seconds that one request may take.
REQUEST_TIMEOUT_SECONDS = 10.0
#: Seconds without a word on the live feed, which has one each second, after which its leader is gone.
FEED_TIMEOUT_SECONDS = 5.0
#: Seconds for which commands wait for the next leader where one is gone. Its lease ends after 2, and then the
#: election begins.
ELECTION_SECONDS = 6.0
#: Seconds between two looks for it, at most.
_LOOK_SECONDS = 0.4
T = TypeVar("T")
_news = MessageDecoder[AnyNews](LINES, "the leader")


class CannotReach(Exception):
    """There is no coordinator to ask, or it says no; the message says why and what to do."""


class StoreAway(CannotReach):
    """etcd does not answer, which knows who leads."""


class ApiClient:
    """The coordinator's REST as typed calls. All raise `CannotReach`. `known` is what we show it: by default
    `$ELASTICD_TOKEN`, where that is set. terminal: texts are made safe for a terminal."""

    def __init__(
        self,
        url: str,
        known: Credentials | None = None,
        *,
        patience: float = REQUEST_TIMEOUT_SECONDS,
        terminal: bool = True,
    ) -> None:
        self.url, self._terminal = url, terminal
        known = known if known is not None else credentials(SecuritySection())
        if objection := known.objection(url):
            raise CannotReach(objection)
        # Loopback and cluster addresses: an HTTP proxy of the environment has no part in this.
        self._patience = patience
        self._client = httpx2.Client(
            base_url=url,
            timeout=patience,
            trust_env=False,
            headers={**known.headers(), USER_HEADER: asker()},
            verify=known.verifying(),
        )
        self._feed: socket.socket | None = None  # of a `live` that somebody reads

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the HTTP connections; the end of a `with` block does the same."""
        self._client.close()

    def end_live(self) -> None:
        """Ends a `live` that another thread reads, which raises CannotReach there. Closing its connection would
        wake nobody: the thread would read until the leader's next message."""
        if (feed := self._feed) is not None:
            with suppress(OSError):
                feed.shutdown(socket.SHUT_RDWR)

    def status(self) -> ClusterStatus:
        """The nodes, jobs and links as the leader sees them now. Raises CannotReach, as every request here
        does."""
        return self._read("/v1/status", ClusterStatus)

    def status_json(self) -> bytes:
        """The status as the coordinator gives it."""
        return self._ask("GET", "/v1/status")

    def events(self, after: int = 0) -> tuple[EventRecord, ...]:
        """Events with an id above `after`, oldest first."""
        return self._read(f"/v1/events?after={after}", Events).events

    def steps(self, job: str, after: int = -1) -> Steps:
        """Steps above `after`, oldest first."""
        return self._read(f"/v1/jobs/{_quoted(job)}/steps?after={after}", Steps)

    def history(self, job: str, after: int = -1) -> tuple[AnyHistoryRecord, ...]:
        """Every plan of the job above this number with the problem it answers, oldest first."""
        return self._read(f"/v1/jobs/{_quoted(job)}/history?after={after}", History).history

    def recording(self) -> Iterator[bytes]:
        """Lines of a recording, an empty one now and then, until the leader ends."""
        try:
            with self._client.stream("GET", "/v1/record") as answer:
                if not answer.is_success:
                    answer.read()
                    raise CannotReach(_refusal_text(answer))
                yield from _lines(answer)
        except httpx2.HTTPError as error:
            raise CannotReach(
                f"the coordinator at {self.url} is gone: {error or type(error).__name__}"
            ) from error

    def output(self, device: str, job: str, after: int, most: int = 1 << 16) -> OutputText:
        """The output of a device's worker: `most` bytes behind the first `after`, or from the newest `-after`
        on. job: "" for the one whose output is the newest. With control characters, whoever reads it."""
        node, _, index = device.rpartition("/")
        where = f"/v1/nodes/{_quoted(node)}/devices/{_quoted(index)}/output"
        content = self._ask("GET", f"{where}?job={quote(job, safe='')}&after={after}&most={most}")
        try:
            return decoded_as(OutputText, content)
        except msgspec.DecodeError as error:
            raise CannotReach(f"the answer of {self.url} is not that of this release ({error})") from error

    def live(self, after: str = "", *, measured: bool = True, page: str = "") -> Iterator[AnyNews]:
        """All that the leader knows, then what changes, until the leader ends; `after`: the id of the last
        message that is known already; `measured`: also what devices measure each step; `page`: the URL of the
        pages that are made of it, for people. Messages of newer releases are skipped."""
        timeout = httpx2.Timeout(self._patience, read=FEED_TIMEOUT_SECONDS)
        path = f"/v1/live?after={quote(after, safe='')}" + ("" if measured else "&measured=false")
        path += f"&page={quote(page, safe='')}" if page else ""
        try:
            with self._client.stream("GET", path, timeout=timeout) as answer:
                if not answer.is_success:
                    answer.read()
                    raise CannotReach(_refusal_text(answer))
                self._feed = answer.extensions["network_stream"].get_extra_info("socket")
                for line in _lines(answer):
                    if (news := _news.one(line)) is not None:
                        yield news
        except (httpx2.HTTPError, msgspec.DecodeError) as error:
            raise CannotReach(
                f"the coordinator at {self.url} is gone: {error or type(error).__name__}"
            ) from error
        finally:
            self._feed = None

    def caller(self) -> CallerStatus:
        """The caller as the coordinator knows it."""
        return self._read("/v1/caller", CallerStatus)

    def spec(self, job: str) -> JobSpec:
        """The job's spec: its model, its batch and its settings."""
        return self._read(f"/v1/jobs/{_quoted(job)}/spec", JobSpec)

    def settings(self) -> Settings:
        """The settings of detection and policy in force, and every change made to them while running."""
        return self._read("/v1/config", Settings)

    def change(self, values: Mapping[str, bool | int | float | str | None], by: str) -> None:
        """Changes the configuration while running; None for the file's own value."""
        self._ask("POST", "/v1/config", msgspec.json.encode({"values": values, "by": by}))

    def drain(self, node: str, *, on: bool) -> None:
        """Lets a node's devices be left, or used again."""
        self._ask("POST", f"/v1/nodes/{_quoted(node)}/drain", msgspec.json.encode({"on": on}))

    def stop(self, job: str, seconds: float, by: str) -> dict[str, str]:
        """Ends a job, whose workers have so many seconds for a last checkpoint. Returns the nodes whose workers
        will not hear of it, with the release of each one's agent."""
        body = msgspec.json.encode({"seconds": seconds, "by": by})
        return self._read(f"/v1/jobs/{_quoted(job)}/stop", Stopping, "POST", body).unheard

    def checkpoint(self, job: str, by: str) -> None:
        """Has a job make a checkpoint now."""
        self._ask("POST", f"/v1/jobs/{_quoted(job)}/checkpoint", msgspec.json.encode({"by": by}))

    def forget_node(self, node: str, by: str) -> None:
        """Has a node that is away shown no more. Raises as `stop`."""
        self._ask("POST", f"/v1/nodes/{_quoted(node)}/forget", msgspec.json.encode({"by": by}))

    def adopt(self, job: str, by: str) -> None:
        """Has the plan that a job's workers run written to etcd, which lacks it."""
        self._ask("POST", f"/v1/jobs/{_quoted(job)}/adopt", msgspec.json.encode({"by": by}))

    def forget(self, job: str, by: str) -> None:
        """Deletes all that is kept of a job that is over."""
        self._ask("POST", f"/v1/jobs/{_quoted(job)}/forget", msgspec.json.encode({"by": by}))

    def chaos(self, action: str, place: str, factor: float = 1.0, seconds: float = 0.0) -> Harming:
        """Does what `elasticd chaos` does, by its verbs; `place` is a device, or a node's name. Returns once
        the agents have heard of it, or with the nodes whose agents are told once they are back."""
        where = "device" if "/" in place else "node"
        body = {"action": action, where: place, "factor": factor, "seconds": seconds}
        return self._read("/v1/chaos", Harming, "POST", msgspec.json.encode(body))

    def cut_data(
        self, action: str, nodes: tuple[str, str], *, seconds: float = 0.0, one_way: bool = False
    ) -> None:
        """Cuts the data network between two nodes, or heals it: action "cut" or "heal"."""
        body = {"action": action, "node": nodes[0], "other": nodes[1], "seconds": seconds, "one_way": one_way}
        self._ask("POST", "/v1/chaos", msgspec.json.encode(body))

    def _read(self, path: str, kind: type[T], method: str = "GET", body: bytes | None = None) -> T:
        try:
            content = self._ask(method, path, body)
            return decoded_as(kind, json_for_terminal(content) if self._terminal else content)
        except msgspec.DecodeError as error:
            raise CannotReach(
                f"the answer of {self.url} is not that of a coordinator of this release ({error}): "
                "run the same release everywhere"
            ) from error

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        try:
            answer = self._client.request(method, path, content=body)
        except httpx2.HTTPError as error:
            if isinstance(error.__context__, ssl.SSLError) or "SSL" in str(error):
                raise CannotReach(
                    f"the coordinator at {self.url} and we do not trust each other ({error}): check ca in "
                    "section [security], and that the coordinator's certificate is for this name and has not "
                    "expired ('elasticd security renew' signs a new one)"
                ) from error
            raise CannotReach(
                f"no coordinator answers at {self.url} ({error or type(error).__name__}): start one with "
                "'elasticd coordinator', or name a living one with --coordinator"
            ) from error
        if answer.is_success:
            return answer.content
        raise CannotReach(_refusal_text(answer))


def _lines(answer: httpx2.Response) -> Iterator[bytes]:
    """The lines of a stream. Only a line feed ends one: texts may hold what Unicode calls a line's end."""
    rest = b""
    for piece in answer.iter_bytes():
        first, *others = piece.split(b"\n")
        rest += first
        for each in others:
            yield rest
            rest = each
    if rest:
        yield rest


def asker() -> str:
    """The user who gives this command, as in alice@host; a user of a container may have no name, but has a
    number."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return f"{name}@{platform.node()}".encode("ascii", "replace").decode()


def _quoted(name: str) -> str:
    """A user's word as one part of a path, whatever is in it."""
    return quote(name, safe="")


def _refusal_text(answer: httpx2.Response) -> str:
    """Why the coordinator said no, in its own words."""
    try:
        problem = answer.json()
    except ValueError:
        problem = None
    if isinstance(problem, dict) and isinstance(problem.get("error"), str):
        return for_terminal(str(problem["error"]))
    return f"{answer.url} answered {answer.status_code}: is that an elasticd coordinator?"


@contextmanager
def reach(
    config: str | None, coordinator: str | None, patience_seconds: float = ELECTION_SECONDS
) -> Iterator[ApiClient]:
    """The coordinator at this URL, else the one that leads by the configured etcd, else that of the one
    `elasticd up` on this machine; patience_seconds: see `leader_url`. Raises `CannotReach` and ConfigError."""
    settings = settings_of(config) if coordinator is None else load(config)
    known = credentials(settings.security)  # what is wrong with them is said before anybody is asked
    url = leader_url(settings, patience_seconds) if coordinator is None else checked_url(coordinator)
    with ApiClient(url, known) as api:
        yield api


def checked_url(url: str) -> str:
    """`url` without a path's end. Raises `CannotReach` where it cannot be one of a coordinator."""
    try:
        parts: Any = urlsplit(url)
        complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        complete = complete and parts.username is None
    except ValueError:
        complete = False
    if not complete:
        raise CannotReach(f"--coordinator {url!r} is no URL: write it as http://127.0.0.1:7471")
    return url.rstrip("/")


def leader_url(config: Config, patience_seconds: float = 0.0) -> str:
    """The leader's address, by the key that it keeps in etcd. A cluster that had a leader may be about to elect
    the next one, for which it waits so long. Raises `CannotReach`."""
    endpoints = ", ".join(config.etcd.endpoints)
    store = EtcdStore(etcd_options(config))
    try:
        leader = _elected(store, Keys(cluster=config.cluster.name), patience_seconds)
    except StoreRefused as error:
        raise CannotReach(f"the etcd at {endpoints} refuses us: {error}") from error
    except StoreError as error:
        raise StoreAway(
            f"no etcd answers at {endpoints} ({error}): start one there (on one machine: elasticd up), set "
            "endpoints in section [etcd] of the configuration (--config), or name the coordinator with "
            "--coordinator"
        ) from error
    except ValueError as error:
        raise CannotReach(f"{error}: another program's key? choose another [cluster] name") from error
    finally:
        store.close()
    if leader is None:
        raise CannotReach(
            f"nobody leads the cluster {config.cluster.name!r} in the etcd at {endpoints}: start a "
            "coordinator with 'elasticd coordinator', or set the right name in section [cluster]"
        )
    return checked_url(leader.value)


def _elected(store: Store, keys: Keys, patience_seconds: float) -> ElectedLeader | None:
    """The leader; None where none is elected, after a wait if the cluster was led before. A leader whose port
    is closed is gone, though its key is still there."""
    deadline, pause = time.monotonic() + patience_seconds, Backoff(_LOOK_SECONDS / 4, _LOOK_SECONDS)
    announced = False
    while True:
        leader = read_leader(store, keys.leader)
        if patience_seconds <= 0 or (leader is not None and _listens(leader.value)):
            return leader
        if time.monotonic() >= deadline or store.get(keys.schema) is None:
            return leader
        if not announced:
            gone = "nobody leads now" if leader is None else f"the leader at {leader.value} does not answer"
            say(f"{gone}: waits up to {patience_seconds:g} s for an election")
            announced = True
        time.sleep(pause.next())


def _listens(url: str) -> bool:
    """Returns True unless the connection is refused: whatever else is wrong is for the request to find."""
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname or "", place.port or 0), timeout=1.0).close()
    except ConnectionRefusedError:
        return False
    except (OSError, ValueError):
        return True
    return True
