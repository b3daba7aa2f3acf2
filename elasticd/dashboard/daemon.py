"""`elasticd dashboard` as a process: the subscription, the board, the server, and a clean end of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import signal
import socket
import sqlite3
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn

from elasticd.client import ApiClient, CannotReach, checked_url, leader_url
from elasticd.config.credentials import Credentials, credentials, of_another, server_context
from elasticd.config.tree import Config, ConfigError
from elasticd.dashboard.app import application
from elasticd.dashboard.board import Board
from elasticd.dashboard.history import EventQuery, HistoryReader, StepRow, opened
from elasticd.dashboard.session import Sessions
from elasticd.dashboard.stream import Streams
from elasticd.dashboard.subscription import Subscription, Told
from elasticd.dashboard.viewer_requests import CANNOT_CHECK, ViewerRequests
from elasticd.records import JobSpec
from elasticd.store.state_file import StateError, default_folder
from elasticd.system.http_connections import BoundedHttpServer, limited_http
from elasticd.system.network_addresses import is_loopback, own_names
from elasticd.system.sd_notify import SdNotifier
from elasticd.system.tcp_listener import bound
from elasticd.version import __version__
from elasticd.wire import live_types as live

#: Seconds between two times that the view of the cluster is kept for a restart.
KEEP_SECONDS = 30.0
#: Seconds to hear from a leader before the start is over.
FIRST_SECONDS = 3.0
#: Specs of jobs that are remembered.
MOST_SPECS = 64
#: Bytes of a request's line and headers.
LARGEST_HEAD_BYTES = 16 << 10
#: Connections at once, and files that are left for everything else.
MOST_CONNECTIONS, OTHER_FILES = 1024, 128
#: Seconds in which whoever connects must have asked for something, and taken some of the answer.
SILENT_SECONDS, UNREAD_SECONDS = 10.0, 60.0
#: Seconds that a connection is kept for the next request.
KEPT_SECONDS = 8
#: Seconds between two words about connections that are dropped.
DROPS_SECONDS = 60.0

_log = logging.getLogger(__name__)
T = TypeVar("T")


def history_path(config: Config) -> Path:
    """The file of the history."""
    named = config.dashboard.history
    if named is not None:
        return Path(named).expanduser()
    return default_folder() / f"dashboard-{config.cluster.name}.db"


class Dashboard:
    """One dashboard: `start` serves when it returns, `stop` gives everything back. `coordinator`: its URL;
    None: whoever leads by the configured etcd."""

    def __init__(self, config: Config, coordinator: str | None = None) -> None:
        self.config, self._coordinator = config, coordinator and checked_url(coordinator)
        self.url = ""
        self.cookie, self.hosts = "", own_names(config.dashboard.host)
        self.sessions = Sessions()
        self.board = Board(Streams(int(time.time())))
        self._context = server_context(config.security)
        self.secure = self._context is not None
        self._url = ""  # of whoever leads, as the board has it
        self._reached = ""  # that was connected to last, by any thread
        self._asks: bool | None = None  # by a leader's word; None: there was none yet
        self._asked_before: bytes | None = None  # as the history has it
        self._heard = asyncio.Event()  # a leader, or that there is none
        self._open_to_others = False  # other machines reach this, and nobody said that they may
        self._specs: dict[str, JobSpec] = {}
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="history", initializer=self._open_reader)
        self._local = threading.local()
        self._opened: list[HistoryReader] = []
        self._exits = contextlib.AsyncExitStack()

    @property
    def path(self) -> Path:
        """The file of the history."""
        return history_path(self.config)

    async def start(self) -> None:
        """Raises ConfigError where it cannot serve."""
        section, security = self.config.dashboard, self.config.security
        credentials(security)  # what is wrong with them is said before anything is started
        known = security.asks or security.token_file is not None or credentials(security).token is not None
        self._open_to_others = not is_loopback(section.host) and not security.insecure
        if self._open_to_others and not known:
            raise ConfigError(
                f"[dashboard] host = {section.host!r}: whoever reaches this may look at, drain and change the "
                "cluster: set tokens in section [security] at the coordinators, and token_file here; or host "
                "to 127.0.0.1; or, in a network that only the cluster's users reach, insecure = true in "
                "[security]"
            )
        try:
            await self._start(section.host, section.port, known=known)
        except BaseException:
            await self.stop()
            raise

    async def _start(self, host: str, port: int, *, known: bool) -> None:
        """`known`: there is a token, so that a coordinator asks for it."""
        listener = _bound(host, port)
        self._exits.callback(listener.close)
        loop = asyncio.get_running_loop()
        writer = await asyncio.to_thread(opened, self.path)
        self._asked_before = writer.meta("asks")
        if self._asked_before == b"0" and not known:
            self._asks = False
        saved = writer.meta("view")
        self.subscription = Subscription(
            self._connect,
            writer,
            self.config.dashboard,
            lambda told: _call(loop, self._on_news, told),
        )
        self._exits.push_async_callback(asyncio.to_thread, self.subscription.stop)
        await self._remember(saved)
        port = listener.getsockname()[1]
        self.cookie = f"{'__Host-' if self.secure else ''}elasticd-{port}"
        named = host if host not in ("0.0.0.0", "::") else socket.gethostname()
        self.url = f"{'https' if self.secure else 'http'}://{f'[{named}]' if ':' in named else named}:{port}"
        self.subscription.page = self.url
        await self._serve(listener)
        self._run(self.board.looks(), "looks")
        self._run(self._keep(), "keep")
        self._run(ViewerRequests(self).watch(), "sessions")
        self.subscription.start()
        with contextlib.suppress(TimeoutError):  # so that nobody is asked for a token that none needs
            await asyncio.wait_for(self._heard.wait(), FIRST_SECONDS)

    async def _remember(self, saved: bytes | None) -> None:
        """The cluster as it was before a restart, until a leader says how it is."""
        if saved is not None:
            try:
                self.board.known.restore_view(zlib.decompress(saved))
            except (msgspec.DecodeError, zlib.error) as error:
                _log.warning("what was known of the cluster before cannot be read: %s", error)

        def read(history: HistoryReader) -> tuple[list[Any], dict[str, StepRow]]:
            told = history.events(EventQuery(limit=2000))[::-1]
            steps: dict[str, StepRow] = {}
            for job in history.facets()[1]:
                if (newest := history.newest_step(job)) is not None:
                    steps[job] = newest
            return told, steps

        self.board.remember(*await self.read(read))

    async def _serve(self, listener: socket.socket) -> None:
        context = self._context
        drops = _Drops()
        http: Any = limited_http(
            drops,
            silent_seconds=SILENT_SECONDS,
            unread_seconds=UNREAD_SECONDS,
        )
        config = uvicorn.Config(
            application(self),
            http=http,
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            ws="none",
            h11_max_incomplete_event_size=LARGEST_HEAD_BYTES,
            timeout_graceful_shutdown=2,
            timeout_keep_alive=KEPT_SECONDS,
            ssl_context_factory=(lambda config, default: context) if context is not None else None,
        )
        server = BoundedHttpServer(config, most_connections=most_connections(), refused=drops)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="server")

        async def close() -> None:
            self.board.streams.close()
            server.should_exit = True
            await task

        self._exits.push_async_callback(close)
        while not server.started:
            if task.done():
                await task
                raise ConfigError(f"the server at {self.url} ended at once")
            await asyncio.sleep(0.005)

    def _run(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_log_failure)

        async def finish() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._exits.push_async_callback(finish)

    async def stop(self) -> None:
        """Harmless when called again."""
        await self._exits.aclose()
        await asyncio.to_thread(self._readers.shutdown, cancel_futures=True)
        for reader in self._opened:
            reader.close()
        self._opened.clear()

    async def _keep(self) -> None:
        """Keeps the view of the cluster, now and again and at the end."""
        try:
            while True:
                await asyncio.sleep(KEEP_SECONDS)
                await self._keep_now()
        finally:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._keep_now())

    async def _keep_now(self) -> None:
        if self.board.known.heard:
            text = self.board.known.store_view()
            await asyncio.to_thread(lambda: self.subscription.keep("view", zlib.compress(text, 1)))

    # -- the subscription ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connect(self) -> Iterator[ApiClient]:
        """Whoever leads. Raises CannotReach and ConfigError."""
        known = credentials(self.config.security)
        url = self._coordinator or leader_url(self.config)
        with ApiClient(url, known, terminal=False) as api:
            if self._asks is None or url != self._reached:
                self._learn(api, url)
            self._reached = url
            yield api

    def _learn(self, api: ApiClient, url: str) -> None:
        """Learns if the coordinator asks for tokens: it says so to callers that ask for their role. A leader
        that asks for none after one that did opens nothing: only a restart of the dashboard does."""
        asks = api.caller().asks
        if not asks and self._asks:
            _log.warning(
                "the leader at %s asks for no tokens, unlike one before: viewers go on to need one, which it "
                "cannot check; set tokens there, or restart the dashboard",
                url,
            )
            return
        if not asks and self._open_to_others:
            _log.error("the dashboard lets nobody in: %s", CANNOT_CHECK)
        self._asks = asks
        word = b"1" if asks else b"0"
        if word != self._asked_before:
            try:
                self.subscription.keep("asks", word)
                self._asked_before = word
            except sqlite3.Error as error:
                _log.warning("the history does not keep whether tokens are asked for: %s", error)

    def _on_news(self, told: Told) -> None:
        self._heard.set()
        if told.news is None:
            self._url = ""
        elif isinstance(told.news, live.LiveHello):
            self._url, self._specs = self._reached, {}
        elif isinstance(told.news, live.Drop) and told.news.kind == "job":
            self._specs = {job: spec for job, spec in self._specs.items() if job != told.news.key}
        try:
            self.board.hear(told)
        except Exception:
            _log.exception("the dashboard failed on %r", told.news)

    # -- what the server asks for (`app.Served`)
    # -----------------------------------------------------------------

    @property
    def asks(self) -> bool:
        """True if viewers have to sign in: always, but where a leader said that it asks nobody for a token, and
        only this machine reaches the dashboard or the configuration says `insecure`."""
        return self._asks is not False or self._open_to_others

    @property
    def leader(self) -> str:
        """The URL of whoever leads; empty where nobody does."""
        return self._url

    def credentials(self, token: str | None) -> Credentials:
        """By which a viewer's request is passed on."""
        return of_another(self.config.security, token)

    async def read(self, work: Callable[[HistoryReader], T]) -> T:
        """Reads the history, beside the loop."""

        def at_once() -> T:
            reader: HistoryReader = self._local.reader
            with reader.at_once():
                return work(reader)

        return await asyncio.get_running_loop().run_in_executor(self._readers, at_once)

    def _open_reader(self) -> None:
        self._local.reader = HistoryReader(str(self.path))
        self._opened.append(self._local.reader)

    async def spec(self, job: str) -> JobSpec | None:
        """A job's spec; None where that cannot be known now."""
        specs = self._specs  # others take their place where jobs may have changed
        if job in specs:
            return specs[job]
        if not self._url:
            return None
        try:
            job_spec = await asyncio.to_thread(self._spec, job)
        except (CannotReach, ConfigError):
            return None
        while len(specs) >= MOST_SPECS:
            del specs[next(iter(specs))]
        specs[job] = job_spec
        return job_spec

    def _spec(self, job: str) -> JobSpec:
        with self._connect() as api:
            return api.spec(job)


def _call(loop: asyncio.AbstractEventLoop, work: Callable[[Told], None], told: Told) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the dashboard ends
        loop.call_soon_threadsafe(work, told)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the dashboard's %s ended", task.get_name(), exc_info=error)


class _Drops:
    """Counts connections that are dropped, and says so now and again."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._said = -math.inf

    def __call__(self, why: str) -> None:
        """One more."""
        self._counts[why] += 1
        now = time.monotonic()
        if why != "silent" and now - self._said >= DROPS_SECONDS:
            self._said = now
            _log.warning("connections of browsers are dropped, by cause: %s", dict(self._counts))


def most_connections() -> int:
    """Connections at once: with fewer files at hand than they need, the history could not be read."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft < 0 else max(16, min(MOST_CONNECTIONS, soft - OTHER_FILES))


def _bound(host: str, port: int) -> socket.socket:
    try:
        return bound(host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot serve at {host}:{port} ({error.strerror or error}): set host and port in section "
            "[dashboard] of the configuration to an address of this machine that is free"
        ) from error


async def run(config: Config, coordinator: str | None = None) -> None:
    """Serves until SIGINT or SIGTERM. Raises ConfigError where it cannot."""
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    supervisor = SdNotifier()
    watch = asyncio.create_task(supervisor.watch())
    dashboard = Dashboard(config, coordinator)
    try:
        await dashboard.start()
        text = f"dashboard of {config.cluster.name} at {dashboard.url}"
        _log.info("elasticd %s: %s, history in %s", __version__, text, dashboard.path)
        print(text, flush=True)
        supervisor.ready(text)
        await ending.wait()
    finally:
        supervisor.stopping()
        watch.cancel()
        await dashboard.stop()


def serve(config: Config, coordinator: str | None = None) -> int:
    """The process: 0 after a signal, 1 with one message where it cannot serve."""
    try:
        asyncio.run(run(config, coordinator))
    except KeyboardInterrupt:
        return 0
    except (ConfigError, StateError, CannotReach) as error:
        print(f"elasticd dashboard: {error}", file=sys.stderr, flush=True)
        return 1
    return 0
