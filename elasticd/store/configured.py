"""The etcd that the configuration names, with its TLS and its password."""

from __future__ import annotations

import os

from elasticd.config.credentials import secret
from elasticd.config.tree import Config, ConfigError
from elasticd.records import Keys
from elasticd.store.session import EtcdOptions

#: The password of `[etcd] user`, instead of `password_file`.
PASSWORD_VARIABLE = "ELASTICD_ETCD_PASSWORD"


def etcd_options(config: Config) -> EtcdOptions:
    """The options by which a daemon or a command reaches etcd. Raises ConfigError where a secret or a file is
    missing."""
    section = config.etcd
    for key, path in (("ca", section.ca), ("cert", section.cert), ("key", section.key)):
        if path is not None and not os.access(os.path.expanduser(path), os.R_OK):
            raise ConfigError(
                f"[etcd] {key} = {path!r} cannot be read: name a PEM file that this user may read"
            )
    return EtcdOptions(
        endpoints=section.endpoints,
        user=section.user,
        password=_password(config),
        ca_cert=_path(section.ca),
        cert=_path(section.cert),
        key=_path(section.key),
        # Within what a role of this cluster alone may read.
        probe_key=Keys(cluster=config.cluster.name).leader,
    )


def _password(config: Config) -> str | None:
    section = config.etcd
    if section.user is None:
        return None
    if password := os.environ.get(PASSWORD_VARIABLE):
        return password
    if section.password_file is None:
        raise ConfigError(
            f"[etcd] user = {section.user!r} has no password: name the file that holds it as password_file, or "
            f"set ${PASSWORD_VARIABLE}"
        )
    return secret(section.password_file, "[etcd] password_file")


def _path(path: str | None) -> str | None:
    return os.path.expanduser(path) if path is not None else None
