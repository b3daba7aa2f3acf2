"""`elasticd security`: an authority, certificates, a token for each role, and the sections that name them."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from elasticd.cli.options import F
from elasticd.config.security import Role

#: The files of the authority; the key signs certificates, and no machine of the cluster needs it.
_AUTHORITY, _AUTHORITY_KEY = "ca.pem", "ca.key"
#: The servers that have a certificate.
_SERVERS = ("coordinator", "dashboard")
#: Hosts that every certificate is good for: a command or a browser on the same machine.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
#: Of each file with a section: where it is used, and the keys of `[security]` with the files that they name.
_SECTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "coordinator": (
        "each coordinator",
        {
            "viewers": "viewers",
            "operators": "operators",
            "agents": "agents",
            "cert": "coordinator.pem",
            "key": "coordinator.key",
        },
    ),
    "agent": ("each node's agent", {"ca": _AUTHORITY, "token_file": "agent.token"}),
    "dashboard": (
        "the dashboard",
        {
            "ca": _AUTHORITY,
            "token_file": "viewer.token",
            "cert": "dashboard.pem",
            "key": "dashboard.key",
        },
    ),
    "operator": ("people who run the cluster", {"ca": _AUTHORITY, "token_file": "operator.token"}),
    "viewer": ("people and programs that look", {"ca": _AUTHORITY, "token_file": "viewer.token"}),
}


def hosts_option(default: str) -> Callable[[F], F]:
    """`--host NAME`, as the argument `hosts`; `default`: the hosts where none is named, in words."""
    return click.option(
        "--host",
        "hosts",
        multiple=True,
        metavar="HOST",
        help="A name or an address that coordinators and dashboard are reached by, without a port; may be "
        f"repeated (default: {default}).",
    )


@click.group()
def security() -> None:
    """Make the certificates and tokens that a cluster of several machines needs, and renew them."""


@security.command()
@hosts_option("this machine's name and addresses")
@click.option(
    "--installed",
    metavar="FOLDER",
    help="Where the files will lie on the machines, for the sections to name (default: DIR).",
)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def init(folder: Path, installed: str | None, hosts: tuple[str, ...]) -> None:
    """Make an authority, certificates for coordinators and dashboard, and a token for each role, in DIR.

    DIR must not be there, or be empty. It gets a file with the section [security] for each place that needs
    one: name it by --config, or put the section into your own configuration. Only you may read the files.
    """
    from elasticd.system.certificates import new_authority

    names, folder = _hosts(hosts), folder.absolute()
    place = Path(installed) if installed is not None else folder
    with _new_folder(folder) as scratch:
        authority = new_authority(f"elasticd {secrets.token_hex(4)}")
        _write(scratch / _AUTHORITY, authority.certificate)
        _write(scratch / _AUTHORITY_KEY, authority.key)
        _certificates(scratch, names)
        for role in Role:
            token = secrets.token_hex(32)
            named = "" if role is Role.AGENT else f"{role.value} "  # an agent's name would bind it to that node
            _write(scratch / f"{role.value}s", f"{named}{token}\n".encode())
            _write(scratch / f"{role.value}.token", f"{token}\n".encode())
        for name in _SECTIONS:
            _write(scratch / f"{name}.toml", _section(name, place).encode())
    for name, (where, keys) in _SECTIONS.items():
        click.echo(f"{folder / name}.toml: for {where}, with {', '.join(sorted(keys.values()))}")
    click.echo(f"certificates for {', '.join(names)}; 'elasticd security renew {folder}' makes new ones")
    click.echo(f"keep {folder / _AUTHORITY_KEY} where nobody else reads it: no machine of the cluster needs it")


@security.command()
@hosts_option("those that the certificates are for now")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
def renew(folder: Path, hosts: tuple[str, ...]) -> None:
    """Make new certificates for coordinators and dashboard, by the authority in DIR; tokens stay.

    Coordinators read theirs anew on SIGHUP (systemctl reload), the dashboard at its next start.
    """
    from elasticd.system.certificates import hosts_of

    try:
        names = _hosts(hosts or hosts_of((folder / f"{_SERVERS[0]}.pem").read_bytes()))
        _certificates(folder, names)
    except (OSError, TypeError, ValueError) as error:  # TypeError: the key has a password
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise click.ClickException(
            f"{folder} has no authority to sign with ({why}): name the folder of 'elasticd security init', "
            f"with {_AUTHORITY}, {_AUTHORITY_KEY} and {_SERVERS[0]}.pem in it"
        ) from None
    click.echo(
        f"certificates for {', '.join(names)}: copy {', '.join(f'{name}.pem and .key' for name in _SERVERS)}"
    )


def _hosts(named: Sequence[str]) -> tuple[str, ...]:
    """The hosts of a certificate, each once. Raises click.BadParameter."""
    hosts = named or (socket.gethostname(), socket.getfqdn(), *_own_addresses())
    for host in hosts:
        if not host.isascii() or not host or len(host) > 253 or any(c.isspace() or c in "/@" for c in host):
            raise click.BadParameter(f"--host {host!r} must be a host's name or an address, without a port")
    return tuple(dict.fromkeys((*hosts, *_LOOPBACK)))


def _own_addresses() -> Iterator[str]:
    """The addresses of this machine's name."""
    try:
        addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return
    yield from (str(address[0]).partition("%")[0] for *_, address in addresses)


def _certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Signs the servers' certificates by the authority in the folder. Raises OSError, ValueError."""
    from elasticd.system.certificates import KeyPair, signed

    certificate, key = ((folder / name).read_bytes() for name in (_AUTHORITY, _AUTHORITY_KEY))
    authority = KeyPair(certificate=certificate, key=key)
    for name in _SERVERS:
        pair = signed(authority, f"elasticd {name}", hosts)
        _write(folder / f"{name}.pem", pair.certificate)
        _write(folder / f"{name}.key", pair.key)


def _section(name: str, place: Path) -> str:
    """The section of a place, in TOML."""
    where, keys = _SECTIONS[name]
    paths = {key: str(place / file) for key, file in keys.items()}
    lines = [
        f"{key} = {json.dumps(path, ensure_ascii=False)}" for key, path in paths.items()
    ]  # a JSON string is a TOML string
    return "\n".join([f"# For {where}.", "[security]", *lines, ""])


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder that becomes `folder` at the end; after an error nothing of it is left. Raises
    click.ClickException."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise click.ClickException(
            f"{folder} is there and not empty, and nothing in it is overwritten: name a new folder; 'elasticd "
            f"security renew {folder}' makes new certificates by the authority in an old one"
        )
    try:
        if folder.exists():  # perhaps somebody works in it: it is filled, and not replaced
            scratch = folder
            folder.chmod(0o700)
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # 0700
        try:
            yield scratch
            if scratch != folder:
                scratch.rename(folder)
        except BaseException:
            for file in scratch.iterdir():
                file.unlink()
            if scratch != folder:
                scratch.rmdir()
            raise
    except OSError as error:
        raise click.ClickException(f"{folder} cannot be written: {error.strerror or error}") from None


def _write(path: Path, data: bytes) -> None:
    """Writes a file that its owner alone may read, in the place of an older one at once. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
