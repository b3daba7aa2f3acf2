"""Runs one function in several worker processes, each with a key-value store for bootstrap, and ends them."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import forkserver
from tests.file_key_value import FileKeyValue

#: Environment variable: seconds after which a worker says where it hangs, and exits.
LIMIT = "GANG_SECONDS"
ROOT = Path(__file__).resolve().parents[2]


def run(
    module: str,
    function: str,
    names: Sequence[str],
    *args: Any,
    seconds: float = 180,
    dying: Sequence[str] = (),
) -> dict[str, Any]:
    """Calls `function(name, store, *args)` of the test module file `module` in one process per name; the
    results of all but the `dying` by name."""
    with tempfile.TemporaryDirectory() as folder:
        payload = Path(folder) / ".payload"
        payload.write_bytes(pickle.dumps(args))
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        environment[LIMIT] = str(max(1.0, seconds - 10))
        said = {name: Path(folder) / f".said-{name.replace('/', ':')}" for name in names}
        workers = {
            name: forkserver.start(
                Path(__file__), module, function, name, folder, environment=environment, output=said[name]
            )
            for name in names
        }
        deadline = time.monotonic() + seconds
        try:
            results, errors = {}, []
            for name, worker in workers.items():
                # One that hangs says where, and exits, some seconds before the deadline.
                code = worker.wait(max(1.0, deadline - time.monotonic()))
                if code and name not in dying:
                    errors.append(f"{name} exited with {code}:\n{said[name].read_text()[-3000:]}")
                elif name not in dying:
                    result = Path(folder) / f".result-{name.replace('/', ':')}"
                    results[name] = pickle.loads(result.read_bytes())
            assert not errors, "\n".join(errors)
            return results
        finally:
            for worker in workers.values():
                if worker.poll() is None:
                    worker.kill()
                worker.wait()


def main() -> None:
    import importlib.util

    faulthandler.dump_traceback_later(float(os.environ[LIMIT]), exit=True)
    module, function, name, folder = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("gang_target", module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["gang_target"] = loaded
    spec.loader.exec_module(loaded)
    args = pickle.loads((Path(folder) / ".payload").read_bytes())
    result = getattr(loaded, function)(name, FileKeyValue(Path(folder)), *args)
    (Path(folder) / f".result-{name.replace('/', ':')}").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # as a worker ends: groups that still stand must not hold it up


if __name__ == "__main__":
    main()
