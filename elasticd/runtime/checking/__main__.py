"""The process behind `elasticd check SCRIPT`: prints a line for each layout, and what is wrong.

Exit code 0: every layout gives what one process gives; 1: one does not; 2: nothing could be compared. What the
script prints goes to standard error.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable

import torch

from elasticd.runtime.accepted import ModelError
from elasticd.runtime.checking import layouts
from elasticd.runtime.checking.script import CannotCheck, subject_of
from elasticd.runtime.checking.trial import Subject, tried
from elasticd.runtime.checking.verdict import findings

#: Samples of the one micro-batch.
_SAMPLES = 2


def compared(subject: Subject, say: Callable[[str], None]) -> bool:
    """Tries every layout; whether all are as one process."""
    model, samples = subject.model, min(_SAMPLES, len(subject.dataset))
    one = tried(subject, layouts.alone(model.spec, samples))
    if one.failed is not None:
        where, error = one.failed
        raise CannotCheck(
            f"one process fails{' in ' + where if where else ''}: {type(error).__name__}: {error}"
        )
    say(f"{model.name}: {model.layers} blocks; one process has a loss of {one.loss:.6g}")
    if model.proved:
        say(f"ok    {model.proved}")
    good = True
    for said, plan in layouts.layouts(model.spec, samples).items():
        wrong = list(dict.fromkeys(findings(model, one, tried(subject, plan))))
        say(f"{'WRONG' if wrong else 'ok   '} {said}")
        for line in wrong:
            say(f"      {line}")
        good = good and not wrong
    return good


def main() -> int:
    script, *arguments = sys.argv[1:]
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    warnings.simplefilter("default", UserWarning)
    try:
        good = compared(subject_of(script, arguments), lambda line: print(line, file=answer))
    except (CannotCheck, ModelError) as error:
        print(f"elasticd: {error}", file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads that the script left must not hold it up
