"""The device "vgpu" for tests: host memory that breaks where a GPU breaks (`vgpu.cpp` says where, and how).

Theory of operation. `load` compiles `vgpu.cpp` once for each source, torch and compiler into a cache, and makes
the device torch's accelerator. That cannot be taken back, and a process has one accelerator: so the tests load
it in processes of their own. `alone` makes such a test; where no C++ compiler is there it is skipped.

    @vgpu.alone
    def test_a_kernel_takes_tensors_of_its_device() -> None:
        with pytest.raises(RuntimeError, match="expected all tensors"):
            torch.ones(2, device="vgpu") + torch.ones(2)
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec

import pytest
import torch
from torch.utils import backend_registration

from elasticd.runtime import accelerator
from tests.runtime import gang

NAME, DEVICES = "vgpu", 8
SOURCE = Path(__file__).with_suffix(".cpp")
COMPILERS = ("g++", "c++", "clang++")
OPTIONS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-DAT_PER_OPERATOR_HEADERS")
#: Seconds for the compiler: it needs half a minute, and on a very busy machine many.
PATIENCE = 1800.0

P = ParamSpec("P")
_told: Any = None  # what the library calls must be kept


class NoCompiler(RuntimeError):
    """There is no C++ compiler on PATH."""


class Counts(SimpleNamespace):
    """What a device did: how often the host waited for it, and how many kernels were launched."""

    synchronizations: int
    launches: int


# -- the library ---------------------------------------------------------------------------------------------


def cache() -> Path:
    """The folder of what was compiled."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elasticd-tests"


def library() -> Path:
    """The compiled device. Processes that ask at the same time compile it once.

    Raises:
        NoCompiler: there is none on PATH.
        RuntimeError: the compiler refused the source, as after an update of torch.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler(f"no C++ compiler is on PATH (one of {', '.join(COMPILERS)}): install g++")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    made_of = (torch.__version__, str(torch.version.git_version), version, *OPTIONS)
    key = hashlib.sha256(SOURCE.read_bytes() + "\n".join(made_of).encode()).hexdigest()[:16]
    cache().mkdir(parents=True, exist_ok=True)
    path = cache() / f"vgpu-{key}.so"
    if path.exists():
        return path
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(compiler, path)
    return path


def _compile(compiler: str, path: Path) -> None:
    """Whoever sees `path` sees all of it."""
    home = Path(torch.__file__).parent
    made = path.with_suffix(f".{os.getpid()}")
    places = (f"-I{home}/include", f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-lc10", "-ltorch_cpu")
    command = (compiler, *OPTIONS, str(SOURCE), "-o", str(made), *places)
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        if said.returncode:
            raise RuntimeError(
                f"{SOURCE.name} does not compile with torch {torch.__version__}:\n{said.stderr[-3000:]}"
            )
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def load() -> None:
    """Makes vgpu this process's accelerator: `torch.device("vgpu", 0)` to 7, `torch.accelerator`, `torch.vgpu`.

    Raises as `library`.
    """
    if NAME in torch._C._get_privateuse1_backend_name():
        return
    path = library()
    backend_registration.rename_privateuse1_backend(NAME)
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    accelerator.KINDS[NAME] = replace(accelerator.KINDS["cuda"], register=_registered, graphs=None)
    torch._register_device_module(NAME, _module())  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)


def _module() -> SimpleNamespace:
    """`torch.vgpu`: what torch, and programs for any accelerator, ask of a device's module."""
    generators = tuple(torch.ops.vgpu.default_generator(index) for index in range(DEVICES))

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        named = torch.device(NAME if device is None else device)
        return torch.accelerator.current_device_index() if named.index is None else named.index

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def stream(priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device(NAME, index_of()))

    return SimpleNamespace(
        Event=lambda: torch.Event(torch.device(NAME, index_of())),
        Stream=stream,
        stream=lambda entered: entered,
        _is_in_bad_fork=lambda: False,
        current_device=torch.accelerator.current_device_index,
        current_stream=torch.accelerator.current_stream,
        default_generators=generators,
        device=lambda device: torch.accelerator.device_index(index_of(device)),
        device_count=lambda: DEVICES,
        empty_cache=torch.accelerator.empty_cache,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_rng_state=lambda device=None: generators[index_of(device)].get_state(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed=lambda seed: generators[index_of()].manual_seed(seed),
        manual_seed_all=manual_seed_all,
        set_device=torch.accelerator.set_device_index,
        set_rng_state=lambda state, device=None: generators[index_of(device)].set_state(state),
        synchronize=torch.accelerator.synchronize,
    )


# -- what a test asks of it ----------------------------------------------------------------------------------


def errors() -> list[str]:
    """What was noted since the last call, where nothing could be raised: memory freed while a stream may use
    it, and host memory changed during a copy."""
    return list(torch.ops.vgpu.errors())


def settled_errors() -> list[str]:
    """`errors`, after all devices were waited for: each copy is over, and was checked."""
    for device in range(DEVICES):
        torch.accelerator.synchronize(device)
    return errors()


def limit(size: int, device: int = 0) -> None:
    """The device has so many bytes from now on; 0: as many as at first (64 GiB)."""
    torch.ops.vgpu.limit(device, size)


def on_load(told: Callable[[bytes], None]) -> None:
    """From now on `told` is called before the first launch of each kernel of this process."""
    global _told
    _told = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(told)
    ctypes.CDLL(str(library())).vgpu_on_load(_told)


def register_host(memory: torch.Tensor) -> None:
    """Pins host memory that others own, as cudaHostRegister does; `unregister_host` ends it."""
    torch.ops.vgpu.register_host(memory)


def unregister_host(memory: torch.Tensor) -> None:
    """Ends what `register_host` began. Call it before the memory is freed."""
    torch.ops.vgpu.unregister_host(memory)


def _registered(memory: torch.Tensor) -> Callable[[], object]:
    register_host(memory)
    return functools.partial(unregister_host, memory)


@contextmanager
def counting(device: int = 0) -> Iterator[Counts]:
    """After the block the value has what the device did meanwhile, for all threads."""
    spent = Counts(synchronizations=0, launches=0)
    before = torch.ops.vgpu.counts(device)
    yield spent
    after = torch.ops.vgpu.counts(device)
    spent.synchronizations, spent.launches = (now - then for now, then in zip(after, before, strict=True))


# -- tests in a process of their own -------------------------------------------------------------------------


def needed() -> None:
    """Skips the test where the device cannot be compiled, and else has it compiled."""
    try:
        library()
    except NoCompiler as missing:
        pytest.skip(str(missing))


def alone(test: Callable[P, None]) -> Callable[P, None]:
    """Runs a test in a process of its own, in which vgpu is loaded. Its arguments must be picklable.

    At the end of the test nothing may have been noted as an error.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        needed()
        where = inspect.getfile(test)
        gang.run(__file__, "_inside", ["alone"], where, test.__name__, args, kwargs)

    return run


def _inside(name: str, store: object, where: str, test: str, args: Any, kwargs: Any) -> None:
    """In the child: `test` of the file `where`."""
    from tests.accelerators import vgpu  # this file runs under another name here

    vgpu.load()
    spec = importlib.util.spec_from_file_location("vgpu_test", where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vgpu_test"] = module
    spec.loader.exec_module(module)
    getattr(module, test).__wrapped__(*args, **kwargs)
    assert not (noted := vgpu.settled_errors()), noted
