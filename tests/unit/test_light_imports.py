"""What may import what: the launcher's side needs no tensors and no cloud SDK, and nothing looks upward."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "diloco"
HEAVY = {"torch", "numpy", "boto3", "botocore", "s3fs", "aiobotocore", "transformers", "kubernetes", "torchft"}


@pytest.mark.parametrize(
    "module",
    [
        "diloco",
        "diloco.cli",
        "diloco.access",
        "diloco.grants",
        "diloco.plan",
        "diloco.prune",
        "diloco.stack",
        "diloco.run",
        "diloco.status",
        "diloco.report",
        "diloco.executors.base",
        "diloco.executors.local",
        "diloco.executors.sagemaker",
        "diloco.sagemaker_container",
        "diloco.exchange.records",
        "diloco.exchange.store",
        "diloco.exchange.remote",
        "diloco.replica_entrypoint",
    ],
)
def test_importing_loads_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert module in loaded
    assert loaded & HEAVY == set()


def imports(path: Path) -> set[str]:
    """Every module of diloco that a file imports, at its top, inside a function, or for types."""
    found, known = set(), modules().keys()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            assert node.module is not None
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside if inside <= known else {node.module} | inside
    return found & known


def modules() -> dict[str, Path]:
    """Each module of diloco by its name; packages by theirs."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


# Which part a module belongs to: the longest name that it begins with.
PARTS = {
    "diloco": "names",
    "diloco.errors": "ground",
    "diloco.guard": "ground",
    "diloco.background": "ground",
    "diloco.exchange": "exchange",
    "diloco.exchange.records": "records",
    "diloco.exchange.layout": "records",
    "diloco.exchange.settings": "records",
    "diloco.exchange.round_cost": "records",
    "diloco.exchange.store": "records",
    "diloco.exchange.stores": "records",
    "diloco.exchange.remote": "records",
    "diloco.exchange.bulk": "records",
    "diloco.exchange.s3_errors": "records",
    "diloco.progress": "presence",
    "diloco.presence": "presence",
    "diloco.follower": "presence",
    "diloco.manager": "manager",
    "diloco.fragments": "fragments",
    "diloco.inner_optimizer": "fragments",
    "diloco.work": "fragments",
    "diloco.transfer": "fragments",
    "diloco.outer": "outer",
    "diloco.training": "trainer",
    "diloco.training.config": "configuration",
    "diloco.training.sources": "configuration",
    "diloco.replica_entrypoint": "entrypoint",
    "diloco.executors": "executors",
    "diloco.embedded": "executors",
    "diloco.access": "documents",
    "diloco.cluster_access": "documents",
    "diloco.cost": "documents",
    "diloco.metrics": "ground",
    "diloco.spec_record": "records",
    "diloco.preflight": "run",
    "diloco.detached": "run",
    "diloco.sagemaker_run": "run",
    "diloco.kubernetes_run": "run",
    "diloco.eks": "executors",
    "diloco.estimate": "run",
    "diloco.sagemaker_container": "entrypoint",
    "diloco.spec": "run",
    "diloco.status": "run",
    "diloco.report": "run",
    "diloco.run": "run",
    "diloco.supervisor": "run",
    "diloco.exchange.launchers": "records",
    "diloco.exchange.clock": "records",
    "diloco.exchange.context": "records",
    "diloco.exchange.retrying": "records",
    "diloco.stack": "run",
    "diloco.grants": "run",
    "diloco.plan": "run",
    "diloco.prune": "run",
    "diloco.local_run": "run",
    "diloco.cli": "command line",
    "diloco.signals": "ground",
    "diloco.verify": "verification",
}
# What each part may import besides itself: always downward, and never tensors on the launcher's side.
MAY = {
    "ground": set(),
    "records": {"ground"},
    "exchange": {"ground", "records"},
    "presence": {"ground", "records", "exchange"},
    "manager": {"ground", "records", "exchange", "presence", "fragments"},
    "fragments": {"ground"},
    "outer": {"ground", "records", "exchange", "manager", "fragments"},
    "configuration": {"ground"},
    "trainer": {"ground", "configuration", "manager", "outer"},
    "entrypoint": {"ground", "records", "manager"},
    "executors": {"ground", "records", "documents"},
    "documents": {"ground", "records"},
    "run": {"ground", "records", "executors", "configuration", "documents"},
    "command line": {"ground", "records", "executors", "configuration", "documents", "run", "verification"},
    "verification": {"ground", "records", "exchange"},
}


def part(module: str) -> str:
    while module not in PARTS:
        module = module.rpartition(".")[0]
    return PARTS[module]


def test_every_module_has_its_part() -> None:
    assert {module for module in modules() if part(module) == "names"} == {"diloco"}
    assert set(PARTS.values()) == MAY.keys() | {"names"}


@pytest.mark.parametrize("module", sorted(modules().keys() - {"diloco"}))
def test_nothing_imports_upward(module: str) -> None:
    mine = part(module)
    for imported in imports(modules()[module]) - {"diloco"}:
        theirs = part(imported)
        assert theirs == mine or theirs in MAY[mine], f"{module} ({mine}) imports {imported} ({theirs})"


def test_the_exchange_knows_nothing_outside_itself_but_errors() -> None:
    for module, path in modules().items():
        if module.startswith("diloco.exchange"):
            outside = {name for name in imports(path) if not name.startswith("diloco.exchange")}
            assert outside <= {"diloco", "diloco.errors"}, module


def test_only_the_replicas_side_knows_torch() -> None:
    allowed = {"exchange", "manager", "fragments", "outer", "trainer", "verification"}
    for module, path in modules().items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        top = {name.split(".")[0] for name in names}
        if top & {"torch", "torchft", "safetensors", "numpy"}:
            assert part(module) in allowed, module
        if "torchft" in top:
            assert part(module) in {"manager", "outer"}, module
