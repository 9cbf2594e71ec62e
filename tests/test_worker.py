"""Where a process cannot be copied another one compiles beside it: what it is told, what it leaves, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import autoprec
from autoprec.errors import UnsupportedError
from autoprec.execution import beside, inductor, takeover, worker
from autoprec.execution.inductor import Inductor, Order
from autoprec.execution.worker import Worker
from autoprec.execution.written import read_graph, write_graph
from autoprec.numerics.dtypes import native_formats
from autoprec.numerics.products import GemmSpec
from autoprec.rewriting.calls import Method, With
from autoprec.serial import load_policy
from tests.models import CASES, Case
from tests.test_beside import ended
from tests.test_lowering import plan_of
from tests.test_replanning import Training
from tests.test_takeover import STEPS, cache, made, promote, training


@pytest.fixture(autouse=True, scope="module")
def _empty_cache() -> Iterator[None]:
    """Of the compiler: what other tests have left there nobody would have to compile."""
    with fresh_cache():
        yield


@pytest.fixture(autouse=True)
def _cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, and elsewhere than on Linux; on machines that are busy as well."""
    monkeypatch.setattr(takeover, "can_copy", lambda _: False)
    monkeypatch.setattr(takeover, "_BEGINS_SECONDS", 300.0)


def test_another_process_compiles_what_the_run_takes_from_the_cache() -> None:
    run = training()
    before = run.session.lowering.compiled
    promote(run)
    counters.clear()
    run.steps(STEPS - 1)
    assert isinstance(run.session._takeover._beside, Worker)
    assert run.session.executed_formats().get("2:linear#0", "fp32") == "fp32"
    assert run.session.lowering.compiled == before and not run.told("lowered") and not counters["inductor"]
    run.step()
    assert [e.step for e in run.told("lowered")] == [4 + STEPS] and not run.told("warning")
    assert cache("hit") == 2 and cache("miss") == 0
    run.steps(2)


def test_so_it_does_where_something_is_kept_narrow() -> None:
    run = training()
    plan = plan_of({"0:linear#0": "bf16", "1:relu#0": "bf16"}, {"1:relu#0": "fp8_e4m3"})
    run.session.adopt(plan)
    assert [o.is_lean for o in orders(run.session)] == [True]
    counters.clear()
    run.steps(STEPS - 1)
    assert isinstance(run.session._takeover._beside, Worker)
    run.step()
    assert len(run.told("lowered")) == 1 and not run.told("warning")
    assert cache("hit") == 2 and cache("miss") == 0


def test_a_run_that_was_copied_goes_on_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "can_copy", beside.can_copy)
    run = training()
    promote(run)
    run.steps(2)
    assert not isinstance(run.session._takeover._beside, Worker)
    state = run.session.state_dict()
    monkeypatch.setattr(takeover, "can_copy", lambda _: False)
    rest = Training(run.session.policy, made(), backend="inductor")
    rest.session.load_state_dict(state)
    rest.step()
    assert isinstance(rest.session._takeover._beside, Worker)
    rest.steps(STEPS - 3)
    assert [e.step for e in rest.told("lowered")] == [4 + STEPS] and not rest.told("warning")


def test_one_that_fails_says_why_and_the_run_compiles_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    run = training()
    lost = "order['graphs'][0]['graph']['nodes'][0]['op'] = 'lost'; main(order)"
    monkeypatch.setattr(worker, "_BEGIN", worker._BEGIN.replace("main(order)", lost))
    promote(run)
    run.steps(STEPS)
    [warning] = run.told("warning")
    assert "did not: AssertionError" in warning.evidence and "the run waits for its compiler" in warning.evidence
    assert len(run.told("lowered")) == 1
    run.session.adopt(plan_of({"0:linear#0": "bf16"}))
    assert run.session._takeover.due_step is None  # so would the next


@pytest.mark.parametrize("begins_seconds", [0.0, 1.0])
def test_one_that_is_not_ready_is_not_waited_for_longer_than_compiling_takes(
    monkeypatch: pytest.MonkeyPatch, begins_seconds: float
) -> None:
    """And that is no event: a run that is stopped and goes on has the same ones."""
    run = training()
    monkeypatch.setattr(worker, "_BEGIN", "import time; time.sleep(600)")
    promote(run)
    run.steps(STEPS - 1)
    monkeypatch.setattr(takeover, "_BEGINS_SECONDS", begins_seconds)
    beside, took = run.session._takeover._beside, max(made.seconds for made in run.session.lowering.compiled)
    assert isinstance(beside, Worker)
    waited = list[float]()
    wait = beside.wait
    monkeypatch.setattr(beside, "wait", lambda seconds: (waited.append(seconds), wait(seconds))[1])
    run.step()
    assert waited == [max(begins_seconds, took)] and beside._process.poll() is not None
    assert not run.told("warning") and len(run.told("lowered")) == 1
    run.session.adopt(plan_of({"0:linear#0": "bf16"}))
    assert run.session._takeover.due_step is not None


def test_whatever_cannot_be_asked_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says so with a RuntimeError: a GPU that is out of order, say."""

    def out_of_order() -> None:
        raise RuntimeError("CUDA error")

    run = training()
    monkeypatch.setattr(worker, "switches_here", out_of_order)
    promote(run)
    run.step()
    [warning] = run.told("warning")
    assert "no other process can compile it (CUDA error)" in warning.evidence and len(run.told("lowered")) == 1


def test_without_room_on_the_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 29, 1 << 35))
    with pytest.raises(OSError, match="the GPU has less than 1024 MiB left"):
        Worker([], "cuda")


def test_one_that_ends_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_BEGIN", "raise SystemExit('no such module')")
    monkeypatch.setattr(
        sys, "path", [*sys.path, *(f"/nowhere/{i:0500}" for i in range(1000))]
    )  # more than a pipe holds
    with pytest.raises(OSError, match="it ended at once: no such module"):
        Worker([], "cpu")


KILLED = """
import os, sys, time
from autoprec.execution import worker
waits = "import time; from autoprec.execution import compiling; compiling.compile_whole_files = lambda: time.sleep(600)"
worker._BEGIN = worker._BEGIN.replace("main(order)", f"{waits}; main(order)")
found = worker.Worker([], "cpu")
copied = os.fork()
if not copied:
    time.sleep(600)
print(found._process.pid, copied, flush=True)
time.sleep(600)
"""


def test_it_ends_with_its_process() -> None:
    """Also if that is killed, while a copy of it, which holds the input open, lives on."""
    run = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pid, copied = map(int, run.stdout.readline().split())
    run.kill()
    run.wait()
    try:
        assert ended(pid)
    finally:
        os.kill(copied, signal.SIGKILL)
        run.stdout.close()


def test_it_does_not_read_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    assert Worker([], "cpu").wait(60.0)


def test_without_a_python_to_start_the_run_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("executable", None), ("frozen", True)):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="there is no Python to start"):
            patch.setattr(sys, name, value, raising=False)
            Worker([], "cpu")


SWITCHED = """
import json, subprocess, sys, torch
from torch._inductor import config
from autoprec.execution.compiling import switches_here

plain = switches_here()
torch.set_num_threads(3)
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("medium")
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cuda.enable_flash_sdp(False)
config.max_autotune, config.cpp.simdlen, config.pre_grad_custom_pass = True, 0, None
here = switches_here()
told = '''
import json, sys
order = json.loads(sys.stdin.readline())
from autoprec.execution import compiling
compiling.set_switches(order)
import torch
assert torch.backends.cuda.matmul.allow_tf32  # the old switch and the new ones agree, or torch refuses to tell
print(json.dumps(compiling.switches_here()))
'''
there = subprocess.run([sys.executable, "-c", told], input=json.dumps(here), stdout=subprocess.PIPE, text=True).stdout
print(json.dumps([plain, here, json.loads(there)]))
"""


def test_the_new_process_has_the_switches_of_the_old_one() -> None:
    """torch's, and the compiler's."""
    done = subprocess.run([sys.executable, "-c", SWITCHED], stdout=subprocess.PIPE, text=True, check=True)
    plain, here, there = json.loads(done.stdout)
    assert there == here and all(here[key] != plain[key] for key in here if key != "cuda_device")
    told = here["configs"]["torch._inductor.config"]
    assert told["max_autotune"] is True and told["cpp.simdlen"] == 0


# -- what is written -----------------------------------------------------------------------------------------------


def traced(order: Order, mode: Any) -> list[tuple[Any, ...]]:
    """What the compiler is given of each pass: code, what every node is and is about, what must be saved, options."""
    passes = []

    def look(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        nodes = [(n.name, *(str(n.meta.get(k)) for k in ("recompute", "val", "custom"))) for n in graph.graph.nodes]
        told = sorted((k, str(v)) for k, v in options.items() if k not in ("graph_id", "get_decomp_fn"))
        passes.append((graph.code, nodes, [str(x) for x in inputs], told))
        return lambda arguments: graph(*arguments)

    with pytest.MonkeyPatch.context() as patch, tracing(TracingContext(mode)), torch.enable_grad():
        patch.setattr(inductor, "compile_fx_inner", look)
        inductor.compile_graph(order)
    return passes


def again(order: Order) -> tuple[Order, Any]:
    module, examples, mode = read_graph(json.loads(json.dumps(write_graph(order.module, order.examples))))
    return Order(module, examples, order.is_lean), mode


def same_again(order: Order) -> None:
    found = traced(order, detect_fake_mode(order.examples))
    assert len(found) == 2 and traced(*again(order)) == found


def orders(session: autoprec.Session) -> list[Order]:
    assert session.plan is not None
    return [Inductor(slot.binding, session.plan, slot.rewritten).order for slot in session._slots.values()]


#: Whatever keeps the fewest bytes, whatever it costs.
FEWEST = load_policy("memory").replaced(objective="bytes", noise={"gradient": 1e3, "loss": 1e3})


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name not in ("graph break in each block", "called twice in a step", "transformer, untied")],
    ids=lambda c: c.name,
)
def test_a_graph_that_is_written_and_read_is_compiled_to_the_same(case: Case) -> None:
    """Whatever the plan made of it: products in two formats, storages in FP8, tensors that are made again."""
    model, batches = case.model(), case.batches()[:4]
    autoprec.compile(model, policy=FEWEST, batches=batches, loss_fn=case.loss, events=None)
    session = autoprec.session(model)
    narrow = case.name != "nn.LSTM" or "bf16" in native_formats("cpu")  # without, LSTMs run in FP32
    assert session.plan is not None and session.plan.is_identity != narrow
    for order in orders(session):
        same_again(order)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: self.down(F.gelu(self.up(y))), x, use_reentrant=False)  # type: ignore[no-any-return]


def test_bodies_of_checkpoints_are_written_too() -> None:
    model, batches = Checkpointed(), [torch.randn(8, 12) for _ in range(4)]
    autoprec.compile(model, policy=FEWEST, batches=batches, loss_fn=lambda m, x: m(x).square().mean(), events=None)
    session = autoprec.session(model)
    session.adopt(plan_of({"up:linear#0": "bf16", "down:linear#0": "bf16"}))
    (order,) = orders(session)
    assert [n.op for n in order.module.graph.nodes].count("get_attr") == 1
    same_again(order)


def test_what_a_checkpoint_does_of_its_own_is_refused() -> None:
    module, examples = graph_of(torch.relu, torch.empty(2))
    module.meta["_checkpoint_context_fn"] = torch.utils.checkpoint.noop_context_fn
    with pytest.raises(UnsupportedError, match="a context function of its own"):
        write_graph(module, examples)


def graph_of(function: Callable[..., Any], *examples: Any) -> tuple[fx.GraphModule, Sequence[Any]]:
    graph = fx.Graph()
    graph.output(graph.call_function(function, tuple(graph.placeholder(f"x{i}") for i in range(len(examples)))))
    return fx.GraphModule({}, graph), examples


SPEC = GemmSpec(output="bf16", grad_input="bf16", grad_weight="fp32", native=("fp32", "bf16"))
VALUES = [None, True, 3, "text", 0.1, float("inf"), (1, [2, (3,)]), {"a": (1,), "b": {2: None}}, slice(1, None, 2), ...,
          torch.bfloat16, torch.device("cpu"), torch.contiguous_format, torch.strided, autoprec.Role.GRAD_WEIGHT, SPEC,
          torch.relu, F.layer_norm, torch.ops.aten.mm.default, getattr]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_values_are_read_as_they_were(value: Any) -> None:
    module, _ = graph_of(With(F.gelu, value, named=value), torch.empty(2))
    read, _, _ = read_graph(json.loads(json.dumps(write_graph(module, [torch.empty(2)]))))
    (call,) = (n for n in read.graph.nodes if n.op == "call_function")
    assert call.target.function is F.gelu and call.target.fixed == (value,) and call.target.named == {"named": value}
    assert all(type(found) is type(value) for found in (call.target.fixed[0], call.target.named["named"]))


def test_methods_and_numbers_that_are_none() -> None:
    module, _ = graph_of(With(Method("view"), float("nan")), torch.empty(2))
    (call,) = (n for n in again(Order(module, [torch.empty(2)]))[0].module.graph.nodes if n.op == "call_function")
    assert type(call.target.function) is Method and call.target.function.__name__ == "view"
    assert call.target.fixed[0] != call.target.fixed[0]


def test_inputs_that_share_their_memory_share_it_again() -> None:
    tokens = torch.empty(4, 9, dtype=torch.int64)
    weight = nn.Parameter(torch.empty(6, 5).t())
    activation = torch.empty(2, requires_grad=True)
    order, _ = again(Order(*graph_of(torch.add, tokens[:, :-1], tokens[:, 1:], weight, 3, activation)))
    x, y, w, three, a = order.examples
    assert three == 3 and isinstance(w, nn.Parameter) and w.requires_grad and not x.requires_grad
    assert a.requires_grad and not isinstance(a, nn.Parameter)
    assert [(t.shape, t.stride(), t.dtype, t.storage_offset()) for t in (x, y, w)] == [
        (t.shape, t.stride(), t.dtype, t.storage_offset()) for t in (tokens[:, :-1], tokens[:, 1:], weight)
    ]
    memory = [t.untyped_storage() for t in (x, y, w)]
    assert memory[0]._cdata == memory[1]._cdata != memory[2]._cdata
    assert [m.nbytes() for m in memory] == [4 * 9 * 8, 4 * 9 * 8, 6 * 5 * 4]


def test_what_another_process_could_not_make_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(2)
    with pytest.raises(UnsupportedError, match=r"<lambda> has no name in its module"):
        write_graph(*graph_of(lambda x: x, x))

    def mine(x: Tensor) -> Tensor:
        return x

    monkeypatch.setattr(sys.modules["__main__"], "mine", mine, raising=False)
    mine.__module__, mine.__qualname__ = "__main__", "mine"
    with pytest.raises(UnsupportedError, match="mine has no name in its module"):
        write_graph(*graph_of(mine, x))
    with pytest.raises(UnsupportedError, match="the graph reads Tensor"):
        write_graph(*graph_of(With(torch.add, x), x))
    with pytest.raises(UnsupportedError, match="is sparse"):
        write_graph(*graph_of(torch.relu, x.to_sparse()))
    graph = fx.Graph()
    graph.output(graph.get_attr("bias"))
    with pytest.raises(UnsupportedError, match="bias is a constant of the graph"):
        write_graph(fx.GraphModule({"bias": x}, graph), [])


def test_sizes_that_are_symbols_let_the_run_wait() -> None:
    """With a warning, once."""
    run = training()
    for rows in (96, 160):
        run.model(torch.randn(rows, 16)).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    promote(run)
    run.step()
    [warning] = run.told("warning")
    assert "no other process can compile it" in warning.evidence and "SymInt" in warning.evidence
    assert len(run.told("lowered")) == 1
