"""The coordinator's daemon: from the configuration to leading and serving, and to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from elasticd.codec.record_parts import Shelf
from elasticd.config.credentials import load_pair, server_context
from elasticd.config.tree import Config, ConfigError, reloaded
from elasticd.coordinator import election
from elasticd.coordinator import live_config as changed
from elasticd.coordinator.auth import Authorizer, CallerProof
from elasticd.coordinator.commands import Commands
from elasticd.coordinator.election import CannotLead, Deposed, Term
from elasticd.coordinator.events.event_pages import Pages
from elasticd.coordinator.garbage_collector import collecting
from elasticd.coordinator.http.app import application
from elasticd.coordinator.http.response_encoder import Viewers
from elasticd.coordinator.http.server import CLOSE_IT, OPEN_TO_ALL, bind, serving, url_of
from elasticd.coordinator.leader import Leader
from elasticd.coordinator.live_feed import FeedSource
from elasticd.coordinator.planner_process import COMMAND
from elasticd.coordinator.status import status
from elasticd.coordinator.store_transactions import StoreTransactions
from elasticd.coordinator.store_writer import (
    WriteConflict,
    Writer,
    aged,
    drains,
    in_restart_mode,
    ranks,
    read_times,
    restart_ends,
    stored,
)
from elasticd.machines.coordinator.machine import takeover
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.records import LASTING, AnyHistoryRecord, Keys, decode_history, numbered, read_at
from elasticd.store.leader import ElectedLeader, LeadershipLost
from elasticd.store.lease import LeaseKeeper
from elasticd.store.protocol import Store, StoreError, StoreRefused, StoreReplaced
from elasticd.store.session import host_of
from elasticd.store.state_file import NOTE_SECONDS, StateError, StateFile
from elasticd.system.certificates import renewal_due
from elasticd.system.http_connections import BoundedHttpServer
from elasticd.system.network_addresses import is_loopback, own_names
from elasticd.system.sd_notify import SdNotifier
from elasticd.version import __version__
from elasticd.wire.api_types import ClusterStatus, LeaderStatus

_log = logging.getLogger(__name__)


class Coordinator:
    """One coordinator for one time of leading. `start` stands by until it leads and serves, `ended` waits for a
    reason to end, `stop` gives everything back. The store is the caller's, to close afterwards; `memory` keeps
    what is known of it. `standing_by` hears who leads meanwhile, on a thread of the store's."""

    def __init__(
        self,
        config: Config,
        store: Store,
        *,
        settings: JobSettings | None = None,
        planner: tuple[str, ...] = COMMAND,
        memory: StateFile | None = None,
        standing_by: Callable[[ElectedLeader], None] | None = None,
    ) -> None:
        self.config = config
        self.keys = Keys(cluster=config.cluster.name)
        self.url = ""
        self.leading: Leader
        self._keeper: LeaseKeeper
        self.access = Authorizer.read(config.security)
        self._context = server_context(config.security)
        self._store = store
        self._settings = settings or settings_of(config)
        self._planner = planner
        self._memory = memory
        self._standing_by = standing_by or self._log_leader
        self.viewers = Viewers()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exits = contextlib.AsyncExitStack()
        self._server: BoundedHttpServer | None = None  # once it serves

    async def start(self) -> None:
        """Leads when it returns. Raises `CannotLead`."""
        _log.info("elasticd %s: a coordinator of cluster %s", __version__, self.config.cluster.name)
        self._warn_of_expiry()
        try:
            listener = bind(self.config.coordinator.host, self.config.coordinator.port)
            self._exits.callback(listener.close)
            host, port = self.config.coordinator.host, listener.getsockname()[1]
            stores = [host_of(endpoint) for endpoint in self.config.etcd.endpoints]
            secure = self._context is not None
            self.url = await asyncio.to_thread(url_of, host, port, secure=secure, stores=stores)
            if not self.access.asks and not is_loopback(host):
                if not self.config.security.insecure:
                    raise CannotLead(f"{self.url}: {OPEN_TO_ALL}: {CLOSE_IT}")
                _log.warning("%s: %s ([security] insecure = true)", self.url, OPEN_TO_ALL)
            self._lead(await self._elect(listener))
            await self._serve(listener)
        except BaseException:
            await self.stop()
            raise

    async def ended(self) -> None:
        """Returns after `end`; raises why this coordinator cannot lead any longer."""
        await asyncio.shield(self._end)

    def end(self) -> None:
        """Ends this coordinator in good order."""
        if not self._end.done():
            self._end.set_result(None)

    def fail(self, error: Exception) -> None:
        """Ends this coordinator, which cannot lead any longer, with the reason."""
        if not self._end.done():
            self._end.set_exception(error)

    def reconfigure(self, config: Config) -> None:
        """Goes by a file that was read anew, as far as that is possible: by detection, policy and chaos."""
        self.config = msgspec.structs.replace(
            self.config, detect=config.detect, policy=config.policy, chaos=config.chaos
        )
        self._settings = msgspec.structs.replace(self._settings, detect=config.detect, policy=config.policy)
        self._renew()
        if not hasattr(self, "leading"):  # it stands by, and takes over by these
            return
        changes = msgspec.structs.replace(self.leading.changes, detect=config.detect, policy=config.policy)
        self.leading.follow(changes, "the file of the configuration was read anew")
        self.leading.chaos = config.chaos.enabled

    def _renew(self) -> None:
        """Tokens and certificate as they are in their files now; ones that are wrong change nothing."""
        try:
            access = Authorizer.read(self.config.security)
            if self._context is not None:
                load_pair(self._context, self.config.security)
        except ConfigError as error:
            _log.error("tokens and certificate stay as they are: %s", error)
            return
        before, self.access = self.access, access
        self._end_revoked(before)
        if self.config.security.cert is not None or access.asks:
            _log.info("tokens and certificate are as in their files now")
        self._warn_of_expiry()

    def _end_revoked(self, before: Authorizer) -> None:
        """Ends connections whose token is gone, or is now of another role or name, or whose certificate was
        revoked: links, live feeds."""
        door = self._server.door if self._server is not None else None
        if door is None:
            return
        revoked = [
            guest
            for guest in door.guests
            if isinstance(guest.proof, CallerProof)
            and self.access.caller(guest.proof) != before.caller(guest.proof)
        ]
        for guest in revoked:
            door.drop(guest, "revoked")
        if revoked:
            _log.info("%s connections ended: their tokens or certificates are not known any more", len(revoked))

    def _warn_of_expiry(self) -> None:
        """Says so where the certificate has expired, or will soon."""
        cert = self.config.security.cert
        if cert is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if why := renewal_due(Path(cert).expanduser().read_bytes()):
                _log.warning("the certificate %s %s", cert, why)

    async def stop(self) -> None:
        """Closes sockets, ends planners, gives the leader's key back. Harmless when called again."""
        self.end()
        self._end.exception()  # looked at, so that nobody complains about an error that nobody awaited
        await self._exits.aclose()
        await self.viewers.close()
        self._executor.shutdown(wait=False)

    async def _elect(self, listener: socket.socket) -> Term:
        """The campaign, in the store's thread. One that is given up is waited for: what it won goes back. Who
        stands by refuses connections: nobody is to wait for an answer."""
        loop = asyncio.get_running_loop()
        name = self.config.coordinator.name
        stopped = threading.Event()

        def elect() -> Term | None:
            return election.elect(
                *(self._store, self.keys, name, self.url),
                told=self._standing_by,
                ready=lambda: listener.listen(512),
                stopped=stopped,
            )

        campaign = loop.run_in_executor(self._executor, elect)
        try:
            term = await asyncio.shield(campaign)
        except asyncio.CancelledError:
            stopped.set()
            with contextlib.suppress(CannotLead, StoreError):
                if (won := await campaign) is not None:
                    await asyncio.to_thread(won.leadership.resign, self._store)
            raise
        except StoreRefused as error:
            raise election.refused(error, self._memory) from error
        assert term is not None, "only a cancelled campaign wins nothing"
        keeper = self._keeper = election.keep(self._store, term, self.fail, self._memory)
        self._exits.push_async_callback(election.resign, self._executor, keeper)
        return term

    def _log_leader(self, leader: ElectedLeader) -> None:
        _log.info("standing by: %s leads %s at %s", leader.name, self.config.cluster.name, leader.value)

    def _lead(self, term: Term) -> None:
        if self._memory is not None:
            try:
                self._memory.check(item for item in term.jobs.items if self.keys.lasts(item.key))
            except StoreReplaced as error:
                raise election.refused(error, self._memory) from error
        known = (*term.jobs.items, *term.config.items, *term.drains.items, *term.journal.items)
        try:
            pages = Pages(self.keys, term.journal.items)
            kept = [*pages.restored()]
            jobs = stored(self.keys, term.jobs.items)
            times = read_times(jobs, kept, time.time())
            restarted = ranks(self.keys, term.jobs.items)
            ended = restart_ends(self.keys, term.jobs.items)
            drained = drains(self.keys, term.drains.items)
            ledger = StoreTransactions(self.keys, self._store.limits, known)
        except msgspec.DecodeError as error:
            raise CannotLead(f"the records under {self.keys.root} cannot be read: {error}") from error
        try:
            changes = changed.of(self.config, self.keys, term.config.items)
        except ConfigError as error:
            raise CannotLead(str(error)) from error
        state = takeover(
            term.leadership.term, aged(jobs, times), self._settings, time.monotonic(), drains=drained
        )
        leading = Leader(
            state,
            chaos=self.config.chaos.enabled,
            cluster=self.config.cluster.name,
            failed=self.fail,
            planner=self._planner,
            times=times,
        )
        leading.writer = Writer(
            *(self._store, self._executor, term.leadership, self.keys, ledger),
            told=leading.record,
            refused=leading.unwritten,
            failed=self._unwritable,
            wrote=leading.shares.wrote,
        )
        leading.pages.restore(pages, kept, state.jobs)
        leading.stores.remember(restarted)
        leading.restarting.remember(in_restart_mode(self.keys, term.jobs.items), ended)
        changes = msgspec.structs.replace(changes, detect=self._settings.detect, policy=self._settings.policy)
        leading.follow(changes, f"as changed while running: {', '.join(sorted(changes.values))}")
        leading.lease_fails = lambda: self._keeper.away
        self.leading, self.commands = leading, Commands(leading)
        self._exits.push_async_callback(leading.planning.close)
        self._exits.callback(leading.decoding.shutdown, wait=False, cancel_futures=True)
        self._start(leading.writer.run(), "writer")
        self._exits.push_async_callback(self._flush, leading)
        self._start(leading.ticks(), "ticks")
        self._start(leading.pages.keeping(), "journal")
        self._start(leading.feed.rounds(self.listening, self.viewers.beside), "live")
        if self._memory is not None:
            self._start(self._remember(self._memory), "memory")

    def _unwritable(self, error: Exception) -> None:
        """The store takes nothing of this leader any more."""
        self.fail(election.refused(error, self._memory) if isinstance(error, StoreRefused) else error)

    async def _remember(self, memory: StateFile) -> None:
        noted: dict[str, int] = {}
        while True:
            await asyncio.to_thread(memory.note, identity=self._store.known())
            numbers = {name: job.highest for name, job in self.leading.state.jobs.items()}
            changed = [name for name, number in numbers.items() if noted.get(name) != number]
            try:
                await asyncio.to_thread(self._mark, memory, changed)
                noted = numbers
            except StoreReplaced as error:  # an old copy, though its revision has passed the one remembered
                self.fail(election.refused(error, memory))
                return
            except StoreError as error:  # it is away, or refuses us: the writer says so
                _log.debug("plans and fences are not remembered now: %s", error)
            await asyncio.sleep(NOTE_SECONDS)

    def _mark(self, memory: StateFile, jobs: Iterable[str]) -> None:
        """Remembers the plans and fences of these jobs as the store has them."""
        items = [self._store.get(self.keys.job(job, part)) for job in jobs for part in LASTING]
        memory.check(item for item in items if item is not None)

    async def _serve(self, listener: socket.socket) -> None:
        security = self.config.security
        host = self.config.coordinator.host
        hosts = own_names(host) if is_loopback(host) else frozenset[str]()
        app = application(self, security.requests_per_second, hosts)
        server = serving(app, security, self._context, self.leading.metrics.refused)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="server")
        self._exits.push_async_callback(self._close, server, task)
        while not server.started:
            if task.done():
                await task
                raise CannotLead(f"the server at {self.url} ended at once")
            await asyncio.sleep(0.005)
        self._server = server

    async def _close(self, server: BoundedHttpServer, task: asyncio.Task[None]) -> None:
        self._server = None
        self.leading.connections.close()
        self.leading.recorders.close()
        self.leading.feed.close()
        server.should_exit = True
        await task

    async def _flush(self, leading: Leader) -> None:
        """Writes the decisions that are left, if the store takes them soon; else the next leader decides
        again."""
        writer = leading.writer
        if writer is None or writer.away or (self._end.done() and self._end.exception() is not None):
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(writer.drained(), 2.0)
        leading.pages.write()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(writer.drained(), 2.0)

    def _start(self, work: Any, name: str) -> None:
        """Runs beside the rest until `stop`; an error in it ends this coordinator."""
        task = asyncio.create_task(work, name=name)

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        async def finish() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        task.add_done_callback(done)
        self._exits.push_async_callback(finish)

    # -- what the server shows -----------------------------------------------------------------------------

    @property
    def _leader(self) -> LeaderStatus:
        return LeaderStatus(name=self.config.coordinator.name, url=self.url, epoch=self.leading.state.epoch)

    def listening(self) -> FeedSource:
        """The source of the live feed."""
        known = self._store.known()
        store = f"{known.cluster_id:x}" if known is not None else ""
        return self.leading.listening(self._leader, self.config.cluster.name, store)

    async def status(self) -> ClusterStatus:
        """Of this moment; what is read of the leader itself is read here, on its loop."""
        return await self.viewers.beside(
            status,
            self.leading.state,
            self.config.cluster.name,
            self._leader,
            self.leading.restarting.listed(),
            time.monotonic(),
            self.leading.now(),
            self.leading.journal.speeds,
            self.leading.unwritten_seconds,
        )

    async def history(self, job: str, after: int) -> list[AnyHistoryRecord]:
        """From the store, in the viewers' thread: it may be much, and no write and no plan waits for it."""
        return await self.viewers.beside(self._histories, job, after)

    def _histories(self, job: str, after: int) -> list[AnyHistoryRecord]:
        items = self._store.snapshot(self.keys.job(job, "")).items
        shelf = Shelf(self.keys.jobs, ((item.key, item.value) for item in items))
        folder = self.keys.job(job, "history/")
        return [
            read_at(item.key, item.value, decode_history, shelf.of(item.key))
            for item in items
            if item.key.startswith(folder)
            and (number := numbered(item.key.removeprefix(folder))) is not None
            and number > after
        ]

    def ready(self) -> str:
        """Why it does not serve, or nothing."""
        return "" if self._server is not None and not self._end.done() else "this coordinator is ending"


def settings_of(config: Config) -> JobSettings:
    """The settings that the machine takes from the configuration."""
    return JobSettings(
        detect=config.detect,
        policy=config.policy,
        keep_seconds=config.coordinator.keep_days * 86_400,
        keep_jobs=config.coordinator.keep_jobs,
        assemble_seconds=config.coordinator.assemble_seconds,
        recover_seconds=config.coordinator.recover_days * 86_400,
        flops=config.planner.flops,
        memory_bandwidth=config.planner.memory_bandwidth,
        inside=config.planner.inside.link,
        between=config.planner.between.link,
        levels=tuple(section.level for section in config.planner.levels),
        communicator=config.planner.communicator,
    )


async def run(
    config: Config, store: Store | None = None, *, reread: Callable[[], Config] | None = None
) -> None:
    """Leads, or stands by, until SIGINT or SIGTERM. A leader that was replaced stands by again. SIGHUP has the
    configuration read anew by `reread`. Raises `CannotLead` where it cannot lead at all; StateError where it
    cannot remember its etcd. A store that is given is not remembered."""
    loop = asyncio.get_running_loop()
    memory, opened = None, store
    if opened is None:
        section = config.coordinator
        memory = StateFile(section.state, config.cluster.name, "coordinator", section.name)
        opened = await asyncio.to_thread(election.connect, config, memory)
    ending = asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, ending.set)
    supervisor = SdNotifier()
    watch = asyncio.create_task(supervisor.watch())
    garbage = asyncio.create_task(collecting())
    notifier = _teller(config, supervisor)
    running: list[Coordinator] = []

    def reload() -> None:
        nonlocal config
        supervisor.reloading()
        config = reloaded(config, reread, ("detect", "policy", "chaos"))
        for one in running:
            one.reconfigure(config)
        supervisor.ready("the configuration was read anew")

    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        while not ending.is_set():
            coordinator = Coordinator(config, opened, memory=memory, standing_by=notifier)
            running[:] = [coordinator]
            try:
                await _term(coordinator, ending, supervisor)
            except (Deposed, LeadershipLost) as error:
                print(f"{config.coordinator.name}: {error}; standing by again", file=sys.stderr, flush=True)
    finally:
        supervisor.stopping()
        watch.cancel()
        garbage.cancel()
        for number in (*signals, signal.SIGHUP):
            loop.remove_signal_handler(number)
        if store is None:
            await asyncio.to_thread(opened.close)


async def _term(coordinator: Coordinator, ending: asyncio.Event, supervisor: SdNotifier) -> None:
    """Stands by, leads once, and gives everything back; returns when `ending` is set."""
    config = coordinator.config
    asked = asyncio.create_task(ending.wait())
    starting, ended = asyncio.create_task(coordinator.start()), asyncio.create_task(coordinator.ended())
    try:
        await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return
        await starting
        text = f"leading {config.cluster.name} as {config.coordinator.name} at {coordinator.url}"
        print(text, flush=True)
        supervisor.ready(text)
        await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            await ended
    finally:
        for task in (starting, asked):
            task.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await coordinator.stop()
        await asyncio.gather(asked, ended, return_exceptions=True)


def _teller(config: Config, supervisor: SdNotifier) -> Callable[[ElectedLeader], None]:
    def tell(leader: ElectedLeader) -> None:
        text = f"standing by as {config.coordinator.name}: {leader.name} leads {config.cluster.name}"
        print(f"{text} at {leader.value}", flush=True)
        supervisor.ready(text)

    return tell


def serve(read: Callable[[], Config]) -> int:
    """The process: 0 after a signal, 1 with one message where it cannot lead."""
    config = read()
    try:
        asyncio.run(run(config, reread=read))
    except KeyboardInterrupt:
        return 0
    except Exception as error:
        if not isinstance(error, CannotLead | ConfigError | StateError | StoreError | WriteConflict):
            _log.exception("the coordinator failed")
        print(f"elasticd coordinator: {error}", file=sys.stderr, flush=True)
        return 1
    return 0
