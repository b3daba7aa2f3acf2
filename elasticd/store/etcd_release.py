"""Which release an etcd is, and what is known against it: members of some hold different data after a crash.

By etcd's own changelog: 3.5.3 mended "inconsistent revision and data", 3.5.5 the durability of a single member,
3.5.6 two more ways to inconsistent members (a crash during defragmentation, authentication and a snapshot).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from elasticd.store.protocol import StoreError

#: The first release without any of them.
SOUND = "3.5.6"
#: The releases from one to another, and what may happen with them.
_KNOWN = (
    ((3, 5, 0), (3, 5, 2), "a member that crashes can lose committed changes and go on with other data"),
    ((3, 5, 3), (3, 5, 4), "a single member that crashes can lose changes that it had acknowledged"),
    (
        (3, 5, 3),
        (3, 5, 5),
        "members can come to hold different data after a crash during defragmentation, or with authentication "
        "after a snapshot",
    ),
)
_log = logging.getLogger(__name__)


def objection(release: str) -> str:
    """The objection against a release of etcd, with the remedy; nothing for others, and for no release."""
    version = re.match(r"v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})", release)
    if version is None:
        return ""
    number = tuple(int(part) for part in version.groups())
    known = [what for since, until, what in _KNOWN if since <= number <= until]
    if not known:
        return ""
    return f"etcd {release}: {'; '.join(known)}. Run {SOUND} or newer"


def warn(release: Callable[[], str]) -> None:
    """Logs what is known against the etcd of a daemon, if anything is. release: as `EtcdStore.release`."""
    try:
        warning = objection(release())
    except StoreError as error:
        _log.debug("etcd did not say its release: %s", error)
        return
    if warning:
        _log.warning("%s", warning)
