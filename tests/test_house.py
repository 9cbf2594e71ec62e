"""House rules: floors, lean imports, exports, documented blocks, no pickle, private modules with a reason."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autoprec"

FLOORS = {
    "formats": 0,
    "checks": 0,
    "errors": 0,
    "graphs": 1,
    "profiles": 1,
    "devices": 1,
    "budgets": 1,
    "policies": 1,
    "policy_problems": 1,
    "policy_schema": 1,
    "plans": 1,
    "floors": 1,
    "states": 1,
    "losses": 1,
    "schedules": 1,
    "planning": 2,
    "reporting": 2,
    "serial": 2,
    "numerics": 3,
    "tracing": 3,
    "calibration": 4,
    "rewriting": 4,
    "monitoring": 4,
    "execution": 4,
    "events": 5,
    "observing": 5,
    "refusals": 5,
    "scheduling": 5,
    "stability": 5,
    "budgeting": 5,
    "replanning": 5,
    "incidents": 5,
    "loss_watch": 5,
    "parts": 5,
    "resuming": 5,
    "provisional": 5,
    "sessions": 5,
    "settling": 5,
    "api": 5,
    "scaler": 5,
    "dynamic": 5,
    "testing": 5,
    "demo": 6,
    "cli": 6,
    "__main__": 6,
}
TORCH_FROM = 3

#: Private names of torch that the package uses, each with its reason.
PRIVATE_TORCH = {
    "torch._foreach_norm": "the norms of many gradients in one kernel, which torch.nn.utils calls as well",
    "DistributedDataParallel._get_active_ddp_module": "the wrapper whose forward pass runs, as Dynamo asks for it",
    "torch.cuda._sleep": "what is timed is asked for while the GPU waits, as torch's own tests do it",
    "torch._dynamo": "the recompile and RNN switches, the only door to Dynamo's configuration",
    "torch._subclasses": "fake tensors: what an FP32 step would hold, told before there is one",
    "torch._guards": "the mode of fake tensors in force, so that a recorder tells its own; compiling under it",
    "torch._inductor": "the compiler itself, and its switches for rounding and random numbers",
    "torch._functorch": "the partitioner that decides what a compiled graph keeps, and the switch of its cache",
    "torch.autograd._unsafe_preserve_version_counter": "buffers that a device puts back, or not, as FSDP does",
    "torch._debug_has_internal_overlap": "an expanded buffer cannot be written to",
    "torch.autograd._profiler_enabled": "one of torch's profilers at a time: the user's comes first",
    "torch._ops": "the type of higher-order operators in captured graphs",
    "torch._C": "the first profiler's allocations; saved-tensor hooks; is a backward pass or transform running",
    "torch.utils._python_dispatch": "a selective checkpoint counts ops, and the observer's must not be among them",
    "torch.utils._pytree": "tensors anywhere among the arguments of an op, for parameters that decode themselves",
    "torch.fx.node._get_qualified_name": "torch's functions by name, also those that do not know their module",
    "torch.ops.aten._log_softmax_backward_data": "the same bits as torch's own cross entropy, without a graph of it",
    "torch.ops.aten._fused_sdp_choice": "whether attention has a kernel for what it is given, as torch itself asks",
    "torch.ops.aten._scaled_dot_product_attention_math": "attention op by op with its probabilities, for compilers",
    "torch.ops.mkldnn._is_mkldnn": "torch has no public question for BF16/FP16 instructions on a CPU",
}


def room(path: Path, package: Path = PACKAGE) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def imports(source: str) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.lineno, node.module))
    return found


def floor_violations(path: Path, source: str, package: Path = PACKAGE) -> list[str]:
    """Imports of a room on a higher floor, or of torch below the third."""
    here = room(path, package)
    if here == "__init__":
        return [f"{path.name}:{n}: imports {m}" for n, m in imports(source) if m.startswith(("torch", "autoprec."))]
    wrong = []
    for line, module in imports(source):
        parts = module.split(".")
        if parts[0] == "torch" and FLOORS[here] < TORCH_FROM:
            wrong.append(f"{path.name}:{line}: torch on floor {FLOORS[here]}")
        if parts[0] == "autoprec" and len(parts) > 1 and FLOORS[parts[1]] > FLOORS[here]:
            wrong.append(f"{path.name}:{line}: {here} (floor {FLOORS[here]}) imports {parts[1]}")
        if module.split(".")[0] in ("pickle", "shelve", "marshal", "dill", "cloudpickle"):
            wrong.append(f"{path.name}:{line}: {module} can run code from a file")
    return wrong


def sources() -> list[Path]:
    return [p for p in PACKAGE.rglob("*.py") if "_policies" not in p.parts]


def test_modules_import_from_lower_floors_only() -> None:
    assert len(sources()) > 40
    wrong = [w for p in sources() for w in floor_violations(p, p.read_text(encoding="utf-8"))]
    assert wrong == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("planning/noise.py", "import torch"),
        ("graphs.py", "from autoprec.planning.noise import error_energy"),
        ("numerics/casts.py", "from autoprec.sessions import Session"),
        ("serial/values.py", "import pickle"),
        ("__init__.py", "import torch"),
    ],
)
def test_a_planted_violation_is_seen(file: str, line: str) -> None:
    path = PACKAGE / file
    source = path.read_text(encoding="utf-8")
    assert floor_violations(path, source) == []
    assert floor_violations(path, f"{source}\n{line}\n") != []


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_import_is_lean() -> None:
    assert python("import sys, autoprec; print('torch' in sys.modules, 'numpy' in sys.modules)") == "False False"
    lower = "autoprec.planning.planner, autoprec.serial, autoprec.policies, autoprec.plans, autoprec.profiles"
    assert python(f"import sys, {lower}; print('torch' in sys.modules)") == "False"


def test_every_export_exists() -> None:
    autoprec = importlib.import_module("autoprec")
    for name in autoprec.__all__:
        assert getattr(autoprec, name) is not None
    for path in sources():
        module = importlib.import_module(
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        )
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{path}: {name} is in __all__ but does not exist"


def test_private_torch_is_listed() -> None:
    pattern = re.compile(r"\btorch(?:\.[a-z]\w*)*\._(?!_)\w+")
    for path in sources():
        for used in pattern.findall(path.read_text(encoding="utf-8")):
            assert any(used.startswith(k) for k in PRIVATE_TORCH), f"{path}: {used} needs a reason in PRIVATE_TORCH"


def test_only_the_command_line_reads_the_environment() -> None:
    for path in sources():
        if room(path) != "cli":
            text = path.read_text(encoding="utf-8")
            assert "os.environ" not in text and "getenv" not in text, path


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", documents(), ids=lambda p: p.name)
def test_documented_blocks_run(path: Path) -> None:
    """The Python blocks of one document run one after the other, in one namespace, in an empty folder."""
    blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
    namespace: dict[str, object] = {"__name__": "documented"}
    ran = 0
    for block in blocks:
        exec(compile(block, str(path), "exec"), namespace)  # an error, or an assert of the block itself, is red
        ran += 1
    assert ran == path.read_text(encoding="utf-8").count("```python")


def test_there_are_documented_blocks() -> None:
    assert sum(len(BLOCK.findall(p.read_text(encoding="utf-8"))) for p in documents()) >= 5


@pytest.mark.parametrize("path", documents(), ids=lambda p: p.name)
def test_documents_link_to_files_that_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.in_repository
def test_lint_and_types() -> None:
    for command in (
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy", "--strict", *(str(PACKAGE / p) for p in TYPED)],
    ):
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command[:3])}\n{done.stdout}{done.stderr}"


#: Floors 0 to 2.
TYPED = ("errors.py", "formats.py", "graphs.py", "profiles.py", "devices.py", "budgets.py",
         "policies.py", "policy_problems.py", "plans.py", "floors.py", "states.py", "losses.py", "schedules.py",
         "serial", "planning", "reporting")  # fmt: skip


def test_nothing_is_pickled() -> None:
    """States, plans and profiles are JSON, YAML and safetensors: to read one never runs code."""
    words = re.compile(
        r"^\s*(import|from)\s+(pickle|cloudpickle|dill|joblib|shelve|marshal)|torch\.(save|load)\(", re.M
    )
    found = [str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py") if words.search(path.read_text())]
    assert found == []
    assert words.search("    import pickle") and words.search("x = torch.load(path)")
