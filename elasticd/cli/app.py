"""The command `elasticd` itself: its families of commands, and errors as one message."""

from __future__ import annotations

import re
from typing import Any

import click
from elasticd_planner.value import Invalid

from elasticd.cli.chaos import chaos
from elasticd.cli.check import check
from elasticd.cli.checkpoint import checkpoint
from elasticd.cli.completion import completion
from elasticd.cli.config import config, pause, resume
from elasticd.cli.coordinator import coordinator
from elasticd.cli.dashboard import dashboard
from elasticd.cli.demo import demo
from elasticd.cli.doctor import doctor
from elasticd.cli.drain import drain
from elasticd.cli.history import history
from elasticd.cli.jobs import adopt, forget, jobs, stop
from elasticd.cli.logs import logs
from elasticd.cli.plan import plan
from elasticd.cli.profile import profile
from elasticd.cli.record import record
from elasticd.cli.report import report
from elasticd.cli.run import run
from elasticd.cli.security import security
from elasticd.cli.simulate import simulate
from elasticd.cli.status import status
from elasticd.cli.top import top
from elasticd.cli.up import up
from elasticd.cli.why import why
from elasticd.client import CannotReach
from elasticd.config.tree import ConfigError
from elasticd.extras import ExtraMissing
from elasticd.store.compat import EtcdClientMissing
from elasticd.store.protocol import StoreError
from elasticd.store.state_file import StateError
from elasticd.version import __version__

#: What a user can cause: shown as one message. Anything else is an error of ours, and keeps its traceback.
_EXPECTED = (CannotReach, ConfigError, EtcdClientMissing, ExtraMissing, Invalid, StateError, StoreError)


#: The commands by what they are for, in the order of the help.
_GROUPS = {
    "Run": (up, run, stop, adopt, forget, demo),
    "Look": (status, jobs, top, why, history, logs, report, record, doctor),
    "Operate": (coordinator, dashboard, drain, pause, resume, config, checkpoint, security, chaos),
    "Offline tools": (check, profile, plan, simulate, completion),
}


class _Families(click.Group):
    """Turns expected errors of any command into one message and exit code 1, and lists commands in groups."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except _EXPECTED as error:
            raise click.ClickException(str(error)) from None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes each group with its commands and the whole first sentence of each."""
        for heading, commands in _GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(command.name or "", summary(command)) for command in commands])


def summary(command: click.Command) -> str:
    """The whole first sentence of a command's help, whatever its length, without its full stop."""
    text = " ".join((command.help or "").partition("\n\n")[0].split())
    return re.split(r"\.(?:\s|$)", text, maxsplit=1)[0]


@click.group(cls=_Families, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="elasticd")
def elasticd() -> None:
    """Keep a PyTorch training job at full speed while devices slow down, die and come back.

    The configuration is one TOML file, named by --config or $ELASTICD_CONFIG. Without either, commands ask the
    cluster that 'elasticd up' runs on this machine.
    """


for _commands in _GROUPS.values():
    for _command in _commands:
        elasticd.add_command(_command)
