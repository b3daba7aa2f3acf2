"""The rendezvous handler that torchrun's options ask for: of the live mode, or of the restart mode."""

from __future__ import annotations

import os

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

from elasticd.names import name_refusal
from elasticd.rendezvous import failure_message
from elasticd.rendezvous.errors import RendezvousRefusal
from elasticd.rendezvous.live_mode import LiveHandler
from elasticd.rendezvous.workers_end import listen_to_notices
from elasticd.system import process_mark

#: Seconds to wait for the agent's socket, so that agent and torchrun may be started side by side.
AGENT_SECONDS = 5.0


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """The handler for torchrun's options. Raises RendezvousRefusal for options that cannot work."""
    mode = str(parameters.get("mode", "live"))
    if mode not in ("live", "restart", "auto"):  # the last one is of `elasticd run`
        raise RendezvousRefusal(f"--rdzv-conf mode={mode} is unknown: leave it out (live), or say mode=restart")
    if parameters.run_id in ("", "none"):
        raise RendezvousRefusal(
            "name the job: torchrun --rdzv-id=NAME; torch's default 'none' would be shared by all"
        )
    if why := name_refusal("the job's name", parameters.run_id):
        raise RendezvousRefusal(why)
    seconds = _number(parameters, "agent_timeout", AGENT_SECONDS)
    failure_message.install()
    listen_to_notices()
    # By it the agent knows the workers, if this process is killed and leaves them behind.
    os.environ[process_mark.VARIABLE] = process_mark.mark(os.getpid()) or ""
    if mode == "restart":
        # Here, not above: it takes private names of torch's, which the live mode can do without.
        from elasticd.rendezvous.restart_mode import restart_handler

        grace, settle = _number(parameters, "agent_grace", 5.0), _number(parameters, "settle", 1.0)
        return restart_handler(parameters, seconds, grace=grace, settle=settle)
    return LiveHandler(parameters, seconds, switches=mode == "auto")


def _number(parameters: RendezvousParameters, key: str, default: float) -> float:
    text = str(parameters.get(key, default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 0:
        raise RendezvousRefusal(f"--rdzv-conf {key}={text} must be a number of seconds, as {default:g}")
    return value
