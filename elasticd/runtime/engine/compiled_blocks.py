"""`torch.compile` of a device's blocks, as this device holds them, before other devices wait for them.

A block is compiled after it was cut for its TP group, whose collectives are operators in its graph
(`elasticd.runtime.parallel.redistribute`). So other widths are other graphs, and torch makes each once in a
process: a plan that cuts blocks as an earlier one did compiles nothing. What is done once in a pass (keys of
dropouts, parts of fused parameters) is done in hooks of the block, outside of its graph.

Blocks are compiled by passes of copies whose parameters are zero and which communicate with nobody, over inputs
of the shapes that the plan before has seen. torch makes a graph for the first shape alone, and from the second
one on a graph for all lengths. A process that trains nothing yet does that before it says that it has prepared
a plan. One that trains does it when it has switched, before its first pass, all devices at the same time; torch
cannot compile beside training (`compile_ahead`).

With `compile="chunks"` the consecutive blocks of a chunk are one graph, too (`CompiledRun`): a pass of them
calls Python once, and code goes over the borders of blocks. It is used where nothing separates the blocks in
the autograd graph. They are called one by one where one draws random numbers without a key (which is keyed by
its section), where torch breaks the graph, where its code cannot be made, and where it has more operations than
`_OPERATIONS`.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, cast

import torch
from elasticd_planner.spec.batch import SequencePiece
from elasticd_planner.spec.plan import Plan, Stage
from torch import Tensor, nn

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.communicators import Mesh
from elasticd.runtime.comm.groups import Group
from elasticd.runtime.comm.running_group import Alone, AloneMesh, OneDevice, running
from elasticd.runtime.data.collate import pad
from elasticd.runtime.data.loader import reading
from elasticd.runtime.engine.mixed_precision import converted
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.engine.stage_chunks import BlockRun, autograd_graphs, block_runs
from elasticd.runtime.model.bundle import Bundle, backward, sizes, tensors
from elasticd.runtime.model.graph_breaks import before_compiling
from elasticd.runtime.model.local_model import LocalModel, local_model, pass_of
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.torch_draws import TorchDraws
from elasticd.runtime.parallel import tp_hooks
from elasticd.runtime.parallel.expert_exchange import ExpertExchange
from elasticd.runtime.parallel.packed_row import PackedRow, current_row, passing
from elasticd.runtime.parallel.redistribute import into_graphs
from elasticd.runtime.parallel.router_balance import RouterBalance
from elasticd.runtime.parallel.router_choices import RouterChoices
from elasticd.runtime.threads import DaemonThreads

log = logging.getLogger(__name__)

#: Seconds that a rank waits for its blocks before it says that it has prepared a plan, which is given up after
#: 30. It waits for the rest before its first pass.
SECONDS = 20.0
#: What makes code of graphs, by torch's name.
BACKEND = "inductor"
#: Graphs that torch makes of one function before it gives up, for each kind of block and width.
_GRAPHS = 8
#: Shapes that are remembered of each mode.
_SHAPES = 3
#: Operations of a graph of several blocks at most: code for more takes too long to be made.
_OPERATIONS = 2_000


@dataclass(frozen=True)
class BlockCall:
    """The arguments of a block, as far as graphs differ by them."""

    training: bool  #: not in an evaluation
    grad: bool  #: whether there is an autograd graph
    #: Of each tensor its name ("" of one that is no bundle), shape, type, and whether it needs a gradient.
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]
    packed: bool = False  #: its tensors are those of a packed row


class BlockCalls:
    """With what blocks were called so far: a few calls of each mode. Until those are there, the blocks of a
    pass are noted if it begins unlike all passes before."""

    def __init__(self) -> None:
        self.seen: list[BlockCall] = []
        self._begun: set[BlockCall] = set()

    def wants(self, training: bool, entered: Bundle) -> bool:
        """Returns True if the blocks of a pass are to be noted, which begins with `entered`."""
        call = _call(training, entered)
        if call in self._begun or len(self._alike(call)) >= _SHAPES:
            return False
        self._begun.add(call)
        return True

    def note(self, training: bool, entered: Bundle) -> None:
        """One call of a block; `entered` is what came from the section before."""
        call = _call(training, entered)
        alike = self._alike(call)
        if len(alike) < _SHAPES and call not in alike:
            self.seen.append(call)

    def _alike(self, call: BlockCall) -> list[BlockCall]:
        """The calls of its mode."""
        mode = call.training, call.grad, call.packed
        return [other for other in self.seen if (other.training, other.grad, other.packed) == mode]


def _call(training: bool, entered: Bundle) -> BlockCall:
    return BlockCall(training, torch.is_grad_enabled(), _described(entered), current_row() is not None)


def _described(entered: Bundle) -> tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]:
    named = {"": entered} if isinstance(entered, Tensor) else entered
    return tuple((name, tuple(x.shape), x.dtype, x.requires_grad or not name) for name, x in named.items())


def compile_blocks(modules: Mapping[str, nn.Module]) -> None:
    """Has the blocks among `modules` compiled when they are called, once all their hooks are there. A thread
    that calls them calls `settle_compiler` before.

    Args:
        modules: by section.
    """
    before_compiling()
    into_graphs()
    settle_compiler()
    for section, module in modules.items():
        if section.startswith("blocks."):
            _compile(module)


def _compile(module: nn.Module) -> None:
    plain, entering = module.forward, getattr(module, "entering", None)

    def traced(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if entering is not None:
            entering.clear()  # else the tensors that it knows would be outputs of the graph
        return out

    try:
        module.forward = torch.compile(traced, backend=_code_of)
    except RuntimeError as error:  # torch has no compiler for this Python
        _warn(error)


class CompiledRun:
    """A pass of consecutive blocks as one graph of torch.compile, as long as that can be; else one by one."""

    by_block: bool  #: the blocks are called one by one from now on

    def __init__(self, local: LocalModel, sections: tuple[str, ...]) -> None:
        """
        Args:
            local: has the blocks, on which `compile_blocks` was called.
            sections: theirs, two or more.
        """
        self.by_block = torch._dynamo.config.disable  # by the user, in the environment
        self._name = f"{sections[0]} to {sections[-1]}"
        self._passes = [local.passes[section] for section in sections]
        run = BlockRun([local.modules[section] for section in sections])
        for section in sections:
            for view in local.views.get(section, ()):
                run.register_forward_pre_hook(view)
        try:
            run.forward = torch.compile(run.forward, backend=_code_of_run, fullgraph=True)  # type: ignore[method-assign]
        except RuntimeError as error:  # torch has no compiler for this Python
            self._give_up(error)
        self._passed = pass_of(self._name, run, local.drawing)

    def __call__(self, entered: Bundle) -> Bundle:
        """The output of the last block."""
        return self._pass(entered, self._passed, lambda: self._passes)

    @property
    def draws_nothing(self) -> bool:
        """As `SeededSection.draws_nothing`."""
        passes = self._passes if self.by_block else [self._passed]
        return all(getattr(passed, "draws_nothing", False) for passed in passes)

    @property
    def unseeded(self) -> Callable[[Bundle], Bundle]:
        """As `SeededSection.unseeded`."""
        sections: list[Any] = self._passes
        one_graph = self._passed if self.by_block else cast(Any, self._passed).unseeded
        return lambda entered: self._pass(entered, one_graph, lambda: [each.unseeded for each in sections])

    def _pass(
        self,
        entered: Bundle,
        one_graph: Callable[..., Any],
        by_block: Callable[[], Sequence[Callable[..., Any]]],
    ) -> Bundle:
        if not self.by_block:
            failures: Any = torch._dynamo.exc
            try:
                out: Bundle = one_graph(entered)
                return out
            except (failures.TorchDynamoException, failures.FailOnRecompileLimitHit) as error:
                self._give_up(error)  # no block has run
        for passed in by_block():
            entered = passed(entered if isinstance(entered, Tensor) else dict(entered))
        return entered

    def _give_up(self, error: Exception) -> None:
        self.by_block = True
        cause = getattr(error, "inner_exception", error)
        reason = str(cause).strip().partition("\n")[0]
        log.info("%s are compiled one by one: %s: %s", self._name, type(cause).__name__, reason)


class _NotOneGraph(Exception):
    """Several blocks are not to be one graph."""


@lru_cache(maxsize=1)
def warn_of_slices() -> None:
    """Says once that the blocks of a stage are not compiled."""
    log.warning(
        "blocks on slices of the tokens run without torch.compile: leave sequence_parallel out of "
        "ParallelismOptions if they are to be compiled"
    )


# -- what torch makes of a graph -----------------------------------------------------------------------------

_thread = threading.local()
_widths: set[object] = set()


def settle_compiler() -> None:
    """Sets the compiler's settings, which are those of a thread, before passes of compiled blocks. What fails
    in it ends no step, and it does not give up before all widths have had their graphs."""
    if getattr(_thread, "widths", -1) == len(_widths):
        return
    _thread.widths = len(_widths)
    settings: Any = torch._dynamo.config
    settings.suppress_errors = True
    settings.recompile_limit = max(settings.recompile_limit, _GRAPHS * len(_widths))


def _code_of(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """The code of a graph; the graph itself, which runs eagerly, where no code can be made of it."""
    plain = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
    try:
        return _code(graph, inputs)
    except Exception as error:
        _warn(error)
        return plain.forward


def _code_of_run(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """The code of a graph of several blocks. Raises where they are not to be one graph."""
    operations = sum(node.op.startswith("call_") for node in graph.graph.nodes)
    if operations > _OPERATIONS:
        raise _NotOneGraph(f"a graph of {operations} operations, and {_OPERATIONS} at most are one")
    if _draws(graph):
        raise _NotOneGraph("a block draws random numbers, which are keyed by the block")
    return _code(graph, inputs)


def _code(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    from torch._functorch import config
    from torch._inductor import config as code

    # The backward pass is compiled here, too, so that its failure is seen here. Draws are eager torch's.
    with config.patch(force_non_lazy_backward_lowering=True), code.patch(fallback_random=True):
        backend: Any = torch._dynamo.lookup_backend(BACKEND)
        made: Callable[..., Any] = backend(graph, inputs)
        return made


def _draws(graph: torch.fx.GraphModule) -> bool:
    """Returns whether a graph has a random draw: it is run on tensors that have a shape and no values. Numbers
    that Python's generator drew are inputs."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    sources = [getattr(node.meta.get("grapharg"), "source", None) for node in inputs]
    if any(isinstance(source, torch._dynamo.source.RandomValueSource) for source in sources):
        return True
    fakes = [node.meta["example_value"] for node in inputs]
    mode = next(fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode"))
    with torch.no_grad(), mode, TorchDraws() as draws:
        torch.fx.Interpreter(graph).run(*fakes)
    return draws.drew


_said: list[str] = []


def _warn(error: Exception) -> None:
    """One line for the first failure."""
    log.debug("not compiled", exc_info=error)
    if _said:
        return
    lines = str(error).strip().splitlines() or [""]
    _said.append(f"{type(error).__name__}: {lines[0]}")
    log.warning(
        "blocks run without torch.compile (%s). On CPUs it needs a C++ compiler (install g++, or name one in "
        "CXX), on GPUs Triton (pip install triton); or leave compile out of ParallelismOptions",
        _said[0],
    )


# -- before others wait ----------------------------------------------------------------------------------------

_ahead = DaemonThreads("compiler")


def compile_ahead(recipe: Recipe, plan: Plan, device: str) -> Callable[[], None]:
    """Compiles a device's blocks under a plan that is being prepared, for `SECONDS` at most. Only for a process
    that trains nothing: torch says of the whole process that it compiles, and an AdamW that steps meanwhile
    computes otherwise.

    Args:
        recipe: of the job.
        plan: the new plan, of one module.
        device: this device.

    Returns:
        Waits for the rest. Call it before the first pass.
    """
    done = _ahead(partial(compile_now, recipe, plan, device, ()))
    with suppress(TimeoutError):
        done.result(SECONDS)

    def finish() -> None:
        done.result()

    return finish


def compile_now(recipe: Recipe, plan: Plan, device: str, calls: Sequence[BlockCall]) -> None:
    """Compiles a device's blocks under a plan. What cannot be compiled so is compiled when it is called.

    Args:
        recipe: of the job.
        plan: the plan, of one module.
        device: this device.
        calls: with what blocks were called before; none: the first samples say it.
    """
    if device not in plan.places or plan.stage(plan.places[device]).sliced:
        return
    began = time.perf_counter()
    try:
        _compile_stage(recipe, plan, device, calls)
    except Exception as error:
        log.info("blocks of plan %d are compiled in its first steps: %s", plan.number, error)
        return
    log.info("blocks of plan %d: compiled in %.1f s", plan.number, time.perf_counter() - began)


def _compile_stage(recipe: Recipe, plan: Plan, device: str, calls: Sequence[BlockCall]) -> None:
    recipe.accelerator.use()
    place, name = plan.places[device], plan.module.module
    stage, model, recomputed = plan.stage(place), recipe.module(name), recipe.recomputed_in(name)
    of_lanes = plan.pipelines[place.pipeline].stages[place.stage]
    found = list(calls or _first_calls(recipe, plan))
    if stage.recompute or recomputed:
        found += [again for call in found if (again := replace(call, grad=False)) not in found]
    for section in _kinds(model, stage):
        _pass_a_copy(recipe, model, stage, place.position, (section,), found, of_lanes)
    if recipe.parallelism.compile == "chunks":
        for run in _runs(model, stage, recomputed):
            calls = [call for call in found if call.grad]
            _pass_a_copy(recipe, model, stage, place.position, run, calls, of_lanes)


def _pass_a_copy(
    recipe: Recipe,
    model: Model,
    stage: Stage,
    position: int,
    sections: tuple[str, ...],
    calls: Sequence[BlockCall],
    of_lanes: Stage,
) -> None:
    """Passes of a block of a stage, or of several as one graph, which torch compiles meanwhile, without the
    other members of its group, and without the other lanes. What cannot be called so is compiled in the first
    step."""
    local = local_model(model, stage, position, recipe.accelerator, only=sections)
    parameters = [parameter for _, parameter in local.parameters.values()]
    _have_one_memory(parameters)
    if recipe.precision is not None:
        recipe.precision.add_up(parameters)
    for held in local.buffers.values():
        held.detach().zero_()
    alone = cast(Group, Alone(len(stage.devices), position))
    me = stage.devices[position]
    exchange = ExpertExchange(
        model.spec, of_lanes, me, cast(Mesh, AloneMesh()), alone if len(stage.devices) > 1 else OneDevice(me)
    )
    choices, balance = RouterChoices(recipe.accelerator.device), None
    if recipe.balance is not None and model is recipe.loss_model:
        balance = RouterBalance(recipe.balance, recipe.balanced, local.drawing, recipe.known_length)
    for section, module in local.modules.items():
        if balance is not None:
            balance.attach(section, module)
        choices.attach(model, section, module, compares=len(stage.devices) > 1)
        exchange.attach(model, section, module)
        if len(stage.devices) > 1:
            tp_hooks.attach(model, section, module, stage, alone, shared=exchange.sections)
    with running(alone):
        try:
            for call in calls[:1]:  # eagerly: what modules make in their first call is then in no graph
                for passed in local.passes.values():
                    _pass(local, passed, replace(call, grad=False), recipe.accelerator)
            compile_blocks(local.modules)
            passed = CompiledRun(local, sections) if len(sections) > 1 else local.passes[sections[0]]
            for call in calls:
                _pass(local, passed, call, recipe.accelerator)
        except Exception as error:
            log.debug("%s cannot be passed beforehand: %s", sections, error, exc_info=True)


def _have_one_memory(parameters: Sequence[nn.Parameter]) -> None:
    """Has all parameters be views of the same zeros: blocks of a copy take no memory beside the model's."""
    sizes_: dict[torch.dtype, int] = {}
    for parameter in parameters:
        sizes_[parameter.dtype] = max(sizes_.get(parameter.dtype, 0), parameter.numel())
    zeros = {
        dtype: torch.zeros(size, dtype=dtype, device=parameters[0].device) for dtype, size in sizes_.items()
    }
    for parameter in parameters:
        parameter.data = zeros[parameter.dtype][: parameter.numel()].view(parameter.shape)


def _pass(local: LocalModel, passed: Callable[..., Any], call: BlockCall, accelerator: Accelerator) -> None:
    for module in local.modules.values():
        module.train(call.training)
    bundle = {
        name: torch.zeros(shape, dtype=dtype, device=accelerator.device, requires_grad=needs)
        for name, shape, dtype, needs in call.tensors
    }
    entered: Bundle = bundle[""] if list(bundle) == [""] else bundle
    local.drawing.samples = range(tensors(entered)[0].shape[0])
    _, tokens = sizes(entered)
    row = PackedRow([SequencePiece.whole(0, tokens)], accelerator.device) if call.packed else None
    local.drawing.tokens = None if row is None else (row.sample_of_token, row.positions)
    with torch.set_grad_enabled(call.grad), passing(row):
        out: Bundle = passed(entered)
    if not call.grad:
        return
    if isinstance(out, Tensor):
        backward(out, torch.ones_like(out))
    else:
        backward(out, {name: torch.ones_like(x) if x.requires_grad else None for name, x in out.items()})
    for module in local.modules.values():
        module.zero_grad()


def _kinds(model: Model, stage: Stage) -> list[str]:
    """Blocks of a stage of which no two have the same graph, as far as their attributes say."""
    found: dict[object, str] = {}
    for start, stop in stage.chunks:
        for layer in range(start, stop):
            found.setdefault((stage.shares, *_kind(model, f"blocks.{layer}")), f"blocks.{layer}")
    _widths.update(found)
    return list(found.values())


def _runs(model: Model, stage: Stage, recomputed: Sequence[int]) -> list[tuple[str, ...]]:
    """Blocks of a stage that are one graph together, of which no two runs have the same graph."""
    found: dict[object, tuple[str, ...]] = {}
    for start, stop in stage.chunks:
        blocks = [f"blocks.{layer}" for layer in range(start, stop)]
        alone = [f"blocks.{layer}" for layer in range(start, stop) if stage.recompute or layer in recomputed]
        for graph in autograd_graphs(model, blocks, alone):
            for run in block_runs(graph):
                if len(run) > 1:
                    found.setdefault((stage.shares, *(_kind(model, section) for section in run)), run)
    _widths.update(found)
    return list(found.values())


def _kind(model: Model, section: str) -> tuple[str, str]:
    plain = (bool, int, float, str, tuple, torch.dtype)
    attributes = [
        (path, type(module), [(k, v) for k, v in sorted(vars(module).items()) if isinstance(v, plain)])
        for path, module in model.sections[section].named_modules()
    ]
    return str(attributes), str(model.spec.section(section))


def _first_calls(recipe: Recipe, plan: Plan) -> Iterator[BlockCall]:
    """With what training will call blocks: what the embedding gives of the first samples. It is asked on the
    meta device. Where a model or a dataset cannot say it, blocks are compiled in the first step."""
    dataset: Any = recipe.dataset
    if not hasattr(dataset, "__getitem__"):
        return
    name = plan.module.module
    model, stage = recipe.module(name), Stage(start=0, stop=1, devices=("alone/0",), shares=(1,))
    grad = plan.module.trainable or not plan.module.items
    with suppress(Exception):
        local = local_model(model, stage, 0, only=("embed",))
        local.modules["embed"].to("meta")
        for batch in islice(_first_batches(recipe, name, plan.micro_batch), _SHAPES):
            batch = converted(batch, lambda x: x.to("meta"))
            out = local.passes["embed"](recipe.precision.entering(batch) if recipe.precision else batch)
            packed = recipe.data.packing is not None and not plan.module.items
            yield BlockCall(training=True, grad=grad, tensors=_described(out), packed=packed)


def _first_batches(recipe: Recipe, name: str, micro_batch: int) -> Iterator[Any]:
    """The inputs of a module's embedding for the first samples, without what other modules make."""
    dataset: Any = recipe.dataset
    graph = recipe.model.graph
    items = "" if graph is None else graph.modules[name].items
    collate = reading(recipe.reads, recipe.data.collate)
    for index in range(len(dataset)):
        sample = dataset[index]
        if items:
            yield from (pad([item]) for item in sample.get(items, ()))
            continue
        if graph is not None:
            sample = {key: part for key, part in sample.items() if key not in graph.items}
        # Of a packed row, one sequence says it all.
        batch = collate([sample] * (1 if recipe.data.packing is not None else micro_batch))
        yield batch if graph is None else {**batch, **dict.fromkeys(graph.modules[name].takes)}
