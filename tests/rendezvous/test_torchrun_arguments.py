"""A script's own arguments, as they pass through the torchrun of `elasticd run`."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import run
from torch.distributed.elastic.utils import macros

from elasticd.rendezvous.torchrun import parsed

OPTIONS = ["--nnodes=1:1", "--nproc-per-node=1", "--rdzv-backend=elasticd", "--rdzv-id=j"]
#: Options of torchrun's own, abbreviations of them, macros, and any text.
ARGUMENTS = st.sampled_from(
    [
        "--log",
        "--log=3",
        "--nnodes",
        "--rdzv",
        "-m",
        "-h",
        "--help",
        "--",
        "-",
        "",
        "-x",
        "--no",
        "${local_rank}",
    ]
) | st.text(string.printable, max_size=8)


@given(st.lists(ARGUMENTS, max_size=5), st.booleans())
def test_script_gets_its_arguments_as_they_are_whatever_they_are(arguments: list[str], module: bool) -> None:
    script = "pkg.mod" if module else "a $$ script.py"
    options = [*OPTIONS, *(["-m"] if module else [])]
    config, _, command = run.config_from_args(parsed([*options, "--", script, *arguments]))
    assert config.run_id == "j"
    assert macros.substitute(command, "0") == ["-u", *(["-m"] if module else []), script, *arguments]
