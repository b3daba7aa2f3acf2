"""Figures of one GPU in six minutes: a step beside plain torch's, where the host is, NCCL, a cluster inside it.

    python benchmarks/_on_a_gpu.py                      # on the GPU at hand, cuda:0
    python benchmarks/_on_a_gpu.py cpu                  # tries this program; says nothing of speed
    python benchmarks/_on_a_gpu.py cuda:0 host eager    # these parts alone
    python benchmarks/_on_a_gpu.py cuda:0 --traces DIR --out figures.json

Each figure is a line of JSON, printed as it comes: a machine that is lost loses the figures after it alone. A
part that fails says so, and the next one runs; parts that no second is left for are named. `--out` gets all
figures as one JSON object.

What has run where: all parts run on the CPU, by a test, and there `shares` has emulated devices. Nothing has
run on a GPU since the parts have been one program. Never tried on a GPU: master weights in float32, captured
passes of plain torch and of ours (`floor`), those in a pipeline's slots beside sums over NCCL (a test in
`nccl`), the shares of a GPU's multiprocessors (`shares`). Earlier versions of `eager`, `compiled`, `paid` and
of the NCCL tests have run on one H100 (docs/status.md).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from _gpu_figures import Figures, Sizes, parts  # noqa: E402
from _gpu_programs import nccl_tests, shares  # noqa: E402

from elasticd.runtime.accelerator import Accelerator  # noqa: E402

#: Seconds of all parts, and those that a part must have left to begin.
SECONDS, LEAST_SECONDS = 360.0, 15.0


def measured(
    device: str,
    only: Sequence[str] = (),
    *,
    traces: Path | None = None,
    seconds: float = SECONDS,
) -> Iterator[tuple[str, Any]]:
    """All figures, or those of the parts `only`, as they come."""
    accelerator = Accelerator(device)
    accelerator.use()
    ends = time.monotonic() + seconds
    table: dict[str, Callable[[], Figures]] = {
        **parts(accelerator, Sizes.of(accelerator), traces),
        "nccl": lambda: nccl_tests(accelerator, min(90.0, ends - time.monotonic() - 60)),
        "shares": lambda: shares(accelerator, ends - time.monotonic()),
    }
    if unknown := [name for name in only if name not in table]:
        raise SystemExit(f"no such part: {', '.join(unknown)} (choose from {', '.join(table)})")
    for name in only or table:
        if ends - time.monotonic() < LEAST_SECONDS:
            yield f"{name}: not run", "no time was left"
            continue
        began = time.monotonic()
        try:
            yield from table[name]()
        except Exception as error:  # the other parts are worth their time
            traceback.print_exc()
            yield f"{name}: failed", f"{type(error).__name__}: {error}"[:300]
        accelerator.give_back()
        yield f"{name}: seconds", time.monotonic() - began


def main(arguments: Sequence[str]) -> int:
    """Prints the figures. Returns 1 where a part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("device", nargs="?", default="cuda:0", help='as "cuda:0"; "cpu" tries the program')
    parser.add_argument("parts", nargs="*", help="these parts alone")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all parts (default: %(default)s)")
    parser.add_argument("--traces", type=Path, help="a folder that gets a chrome trace of a step of each side")
    parser.add_argument("--out", type=Path, help="a file that gets all figures")
    options = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(options.seconds + 60, exit=True)  # a device that hangs ends with stacks
    figures: dict[str, Any] = {}
    began = time.perf_counter()
    for name, value in measured(options.device, options.parts, traces=options.traces, seconds=options.seconds):
        figures[name] = value
        at = round(time.perf_counter() - began, 1)
        print(json.dumps({"at": at, "figure": name, "value": value}), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(figures, indent=2) + "\n")
    faulthandler.cancel_dump_traceback_later()
    return int(any(name.endswith(": failed") for name in figures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
