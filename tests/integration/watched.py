"""A script as it is, with the one line before it that lets elasticd watch it."""

from __future__ import annotations

import runpy
import sys

import elasticd

script = sys.argv.pop(1).removeprefix("--script=")
elasticd.watch()
runpy.run_path(script, run_name="__main__")
