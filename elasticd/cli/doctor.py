"""`elasticd doctor`: finds what is missing on this machine and in its cluster, and says what to do."""

from __future__ import annotations

import datetime
import email.utils
import importlib.metadata
import importlib.util
import os
import platform
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import click
import httpx2
import msgspec
from rich.table import Table
from rich.text import Text

from elasticd import extras
from elasticd.cli.console import command_console
from elasticd.cli.options import config_option, json_option, write_json
from elasticd.client import ApiClient, CannotReach, leader_url
from elasticd.config.credentials import credentials
from elasticd.config.tree import CONFIG_VARIABLE, Config, ConfigError
from elasticd.local_cluster import running, settings, taken
from elasticd.store.compat import EtcdClientMissing
from elasticd.store.configured import etcd_options
from elasticd.store.etcd import EtcdStore
from elasticd.store.etcd_release import objection
from elasticd.store.protocol import StoreError
from elasticd.store.server import EtcdServerError, find_etcd
from elasticd.system.torch_build import CannotTell, torch_build
from elasticd.version import __version__
from elasticd.wire.unix_socket import default_path

#: Seconds by which this clock and the coordinator's may differ: events are read side by side.
CLOCK_SKEW_SECONDS = 2.0

Verdict = Literal["ok", "note", "missing"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check: whether it is well, what was found, and what to do where it is not."""

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""


class Flaw(Exception):
    """A fault that a check found, and its remedy."""

    def __init__(self, verdict: Verdict, found: str, remedy: str = "") -> None:
        super().__init__(found)
        self.verdict, self.found, self.remedy = verdict, found, remedy


@click.command()
@config_option
@json_option("One JSON array, an object for each check.")
def doctor(config: str | None, as_json: bool) -> None:
    """Look for what is missing: packages, torch, etcd, coordinator, agent, clocks, ports.

    The exit code is 1 where something that training needs is missing.
    """
    findings = list(examined(config))
    failed = any(finding.verdict == "missing" for finding in findings)
    if as_json:
        write_json(findings)
        sys.exit(failed)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path that is cut helps nobody
    styles = {"ok": "green", "note": "yellow", "missing": "red"}
    for finding in findings:
        # As Text: words in brackets, as [etcd], would be taken for rich's markup.
        table.add_row(Text(finding.verdict, style=styles[finding.verdict]), finding.what, Text(finding.found))
        if finding.remedy:
            table.add_row("", "", Text(finding.remedy, style="bold"))
    command_console().print(table)
    sys.exit(failed)


def examined(path: str | None) -> Iterator[Finding]:
    """The findings, one after the other; what builds on something missing is left out."""
    yield Finding(what="Python", verdict="ok", found=f"{platform.python_version()} at {sys.executable}")
    yield Finding(what="elasticd", verdict="ok", found=__version__)
    yield _checked("torch", _torch)
    yield _checked("torchrun", _handler)
    try:
        config = settings(path)
    except ConfigError as error:
        yield Finding(what="configuration", verdict="missing", found=str(error), remedy="correct that file")
        return
    yield Finding(what="configuration", verdict="ok", found=_named(path))
    yield _checked("etcd program", _etcd_program)
    etcd = _checked("etcd", _etcd, config)
    yield etcd
    if etcd.verdict != "missing":
        coordinator = _checked("coordinator", _coordinator, config)
        yield coordinator
        with suppress(CannotReach, ConfigError):
            if leader_url(config).startswith("https:"):
                yield _checked("certificate", _certificate, config)
        if coordinator.verdict == "ok":
            yield _checked("clocks", _clock, config)
    yield _checked("port", _port, config)
    yield _checked("agent", _agent, config)
    yield _checked("dashboard", _dashboard, config)


def _checked(what: str, check: Callable[..., str], *given: Config) -> Finding:
    """Runs a check; returns its finding or its flaw."""
    try:
        return Finding(what=what, verdict="ok", found=check(*given))
    except Flaw as flaw:
        return Finding(what=what, verdict=flaw.verdict, found=flaw.found, remedy=flaw.remedy)


def _named(path: str | None) -> str:
    """The configuration's source, for people."""
    if named := path or os.environ.get(CONFIG_VARIABLE):
        return named
    if process := running():
        return f"{process[0]}, of the 'elasticd up' that runs here"
    return f"none: the defaults hold (or set {CONFIG_VARIABLE})"


def _torch() -> str:
    if importlib.util.find_spec("torch") is None:
        raise Flaw("note", "not in this environment", f"a node that trains needs it: {extras.install('train')}")
    try:
        build = torch_build()
    except CannotTell as error:
        raise Flaw("missing", str(error), "install torch anew in this environment") from error
    if not build.distributed:
        remedy = "install a build of torch that has torch.distributed"
        raise Flaw("missing", f"{build.version} without torch.distributed", remedy)
    if build.refusal:
        raise Flaw("missing", f"{build.version}: no worker can train here", build.refusal)
    if build.unusable:
        raise Flaw("missing", f"{build.version}: {build.library} cannot be used", build.unusable)
    names = ", ".join(f"{count} x {name}" for name, count in Counter(build.devices).items())
    on = "the CPU" if build.computes_on == "cpu" else names
    return f"{build.version}: workers compute on {on}, tensors travel over {build.library}"


def _handler() -> str:
    if not importlib.metadata.entry_points(group="torchrun.handlers", name="elasticd"):
        remedy = "install elasticd with pip into the environment of torchrun, not by PYTHONPATH"
        raise Flaw("missing", "its entry point 'elasticd' is not registered", remedy)
    return "finds --rdzv-backend=elasticd"


def _etcd_program() -> str:
    try:
        return find_etcd()
    except EtcdServerError as error:
        raise Flaw("note", "none here, as 'elasticd up' and 'elasticd demo' need", str(error)) from error


def _etcd(config: Config) -> str:
    endpoints = ", ".join(config.etcd.endpoints)
    try:
        store = EtcdStore(etcd_options(config))
    except (ConfigError, EtcdClientMissing) as error:
        raise Flaw("missing", f"it cannot be asked: {error}") from error
    try:
        identity = store.identity()
    except StoreError as error:
        remedy = "start one there, or set endpoints in section [etcd]; on one machine: elasticd up"
        raise Flaw("missing", f"none answers at {endpoints} ({error})", remedy) from error
    finally:
        store.close()
    releases = _releases(config)
    named = ", ".join(sorted(set(releases))) or "release not told"
    text = f"{endpoints}, {named}, revision {identity.revision}"
    if known := next(filter(None, map(objection, releases)), ""):
        raise Flaw("note", text, known)
    return text


def _releases(config: Config) -> list[str]:
    """Of each member that answers: they may differ."""
    options, findings = etcd_options(config), []
    for endpoint in options.endpoints:
        store = EtcdStore(msgspec.structs.replace(options, endpoints=(endpoint,)))
        with suppress(StoreError):
            findings.append(store.release())
        store.close()
    return findings


def _coordinator(config: Config) -> str:
    try:
        url = leader_url(config)
    except CannotReach as error:
        raise Flaw("missing", str(error), "start one: elasticd coordinator") from error
    try:
        with ApiClient(url, credentials(config.security)) as api:
            status = api.status()
    except CannotReach as error:
        raise Flaw("missing", str(error)) from error
    except ConfigError as error:
        raise Flaw("missing", f"it cannot be asked: {error}") from error
    return f"{status.leader.name} leads at {url}; nodes: {len(status.nodes)}, jobs: {len(status.jobs)}"


def _certificate(config: Config) -> str:
    """A row for how long the leader's certificate is good; nothing is sent to it."""
    from elasticd.system.certificates import expiry_of, renewal_due

    url = urlsplit(leader_url(config))
    try:
        shown = ssl.get_server_certificate((url.hostname or "", url.port or 443), timeout=5.0).encode()
        end, why = expiry_of(shown), renewal_due(shown)
    except (OSError, ValueError) as error:
        raise Flaw("note", f"the leader at {url.geturl()} shows none: {error}") from error
    if why:
        expired = end < datetime.datetime.now(datetime.UTC)
        raise Flaw("missing" if expired else "note", f"of the leader at {url.geturl()}: it {why}")
    days = (end - datetime.datetime.now(datetime.UTC)).days
    return f"of the leader: good for {days} days, until {end:%Y-%m-%d}"


def _clock(config: Config) -> str:
    try:
        known = credentials(config.security)
        answer = httpx2.get(f"{leader_url(config)}/livez", trust_env=False, verify=known.verifying())
        leader_time = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (CannotReach, httpx2.HTTPError, KeyError, ValueError) as error:
        raise Flaw("note", f"the coordinator did not say its time: {error!r}") from error
    skew = abs(time.time() - leader_time - 0.5)  # the header has whole seconds
    if skew > CLOCK_SKEW_SECONDS:
        remedy = "nothing decides by them, but logs are hard to read: run an NTP client"
        raise Flaw("note", f"this machine's and the coordinator's differ by {skew:.0f} s", remedy)
    return f"within {CLOCK_SKEW_SECONDS:g} s of the coordinator's"


def _port(config: Config) -> str:
    """Checks that a coordinator could be started here, unless one runs already."""
    host, port = config.coordinator.host, config.coordinator.port
    if port == 0:
        return "a coordinator takes a free one when it is started"
    with suppress(CannotReach, ConfigError):
        if (url := urlsplit(leader_url(config))).port == port and taken(host, port):
            return f"{host}:{port} is that of the leader, {url.geturl()}"
    if why := taken(host, port):
        raise Flaw("note", f"{host}:{port} cannot be bound ({why}): a coordinator runs here, perhaps")
    return f"{host}:{port} is free for a coordinator"


def _dashboard(config: Config) -> str:
    """Checks that the configured dashboard serves; a cluster does without one."""
    section = config.dashboard
    if section.port == 0:
        return "takes a free port when it is started, and prints it"
    place = f"{section.host}:{section.port}"
    for scheme in ("https", "http"):  # its certificate is in its own configuration, not in that of a viewer
        with suppress(httpx2.HTTPError, ConfigError):
            known, url = credentials(config.security), f"{scheme}://{place}"
            answer = httpx2.get(f"{url}/api/viewer", trust_env=False, timeout=5.0, verify=known.verifying())
            if "signed_in" in answer.text:
                return f"serves at {url}"
    if why := taken(section.host, section.port):
        text = f"something serves at {place} ({why}), which is no dashboard that this configuration trusts"
        raise Flaw("note", text, "check [security] ca, and that its certificate has not expired")
    raise Flaw("note", f"none serves at {place}", "start one where you want to look: elasticd dashboard")


def _agent(config: Config) -> str:
    path = config.agent.socket or default_path()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as tried:
        try:
            tried.connect(path)
        except OSError as error:
            remedy = "start one: elasticd-agent; or name its socket by --rdzv-endpoint or $ELASTICD_SOCKET"
            raise Flaw("missing", f"none serves at {path} ({error.strerror})", remedy) from error
    return f"serves at {path}"
