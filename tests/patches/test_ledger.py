"""The ledger of bindings is complete: what of vLLM's is changed where it stands is declared."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_specrollout"
FILES = sorted(path for folder in ("worker", "server") for path in (PACKAGE / folder).rglob("*.py"))
_LEDGER = tomllib.loads((ROOT / "patches" / "bindings.toml").read_text(encoding="utf-8"))
# (our file, what of vLLM's is changed in it)
BINDINGS = [(where, what) for kind in _LEDGER["kinds"] for where, here in _LEDGER[kind].items() for what in here]
# objects of our own, by the names that our code gives them
OURS = (
    "self.stats stats runner.stats runner.spec_rollout runner.model_drafter runner.model_drafter.is_resting "
    "runner.placed runner.swapper link.window runner.metrics.total runner.shape runner.admissions runner.self_check "
    "runner.verifier runner.mover runner.draft_graphs runner.drafting.withheld self.drafting self.step self.paths "
    "self.inputs runner.inputs inputs view speculator sweep total self.weights_version self.model_runner args "
    "engine_args"
)
# file -> copies of vLLM's objects, made in the same function
COPIES = {
    "server/replica.py": "params",
    "worker/common.py": "clone",
    "worker/models/swapping.py": "copy other",
    "worker/v1/proposer.py": "plain",
    "worker/v1/sampler.py": "clone",
    "worker/v1/thinking.py": "spread",
    "worker/v1/kv.py": "larger tensor",
    "worker/v2/inputs.py": "step emptied copied",
    "worker/v2/scheduler.py": "step",
    "worker/arriving.py": "own params",
}
# file -> names that stand for ours there, and for vLLM's in others
OURS_HERE = {
    "server/asking.py": "function",
    "server/learning.py": "learning",
    "server/replica.py": "live own",
    "worker/calls.py": "withheld",
    "worker/drafting.py": "made self.withheld self.speculator",
    "worker/withheld.py": "held",
    "worker/v2/check_steps.py": "self.drafting self.runner.draft_graphs graphs line inputs",
    "worker/v2/self_check.py": "made",
    "worker/v1/sampler.py": "self.sampler",
    "worker/models/decoupled.py": "self._here self._speculator",
    "worker/models/drafter.py": "drafter drafter.heads proposer self.proposer self._drafting self._runner",
    "worker/models/proposing.py": "rows",
    "worker/v1/proposer.py": "drafter proposer",
    "worker/v2/lane.py": "step one drafter self.drafts self.host self.verifier self._history self._late "
    "self.model_drafter self.model_drafter.heads model",
    "worker/v2/host.py": "step",
    "worker/v2/model.py": "self.beams",
    "worker/v2/runner.py": "step",
    "worker/hidden.py": "runner",
}
RUNNERS = ("worker/v1/runner.py", "worker/v1/cpu_runner.py", "worker/v2/runner.py", "worker/v2/lane.py")
SCHEDULERS = ("worker/scheduler.py", "worker/v2/scheduler.py")


def assigned(path: Path) -> Iterator[ast.Attribute]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute):
                    yield one


def set_by_name(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            yield ast.unparse(node.args[0])


def declared(where: str) -> set[str]:
    return {what for file, what in BINDINGS if file == where}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_change_to_an_object_that_is_not_ours_is_declared(path: Path) -> None:
    where = path.relative_to(PACKAGE).as_posix()
    ours = OURS.split()
    here = ["self", *ours, *COPIES.get(where, "").split(), *OURS_HERE.get(where, "").split()]
    for target in assigned(path):
        owner = ast.unparse(target.value)
        is_ours = owner in here or ast.unparse(target) in ours
        # one entry covers the fields that belong together
        is_declared = any(
            ast.unparse(target) == one or (one.startswith("compilation.") and owner == "compilation")
            for one in declared(where)
        )
        assert is_ours or is_declared, f"{where}:{target.lineno} changes `{ast.unparse(target)}`"
    for owner in set_by_name(path):
        is_declared = any(one.startswith(f"setattr({owner}, ") for one in declared(where))
        assert owner in ours or is_declared, f"{where} sets an attribute of `{owner}` by name"


def _names_of_vllms(files: tuple[str, ...]) -> str:
    from vllm.v1.core.sched import async_scheduler, scheduler
    from vllm.v1.worker import cpu_model_runner, gpu_model_runner
    from vllm.v1.worker.gpu import model_runner

    modules = (
        (scheduler, async_scheduler) if files is SCHEDULERS else (cpu_model_runner, gpu_model_runner, model_runner)
    )
    return "\n".join(inspect.getsource(module) for module in modules)


@pytest.mark.parametrize("files", [RUNNERS, SCHEDULERS], ids=["runners", "schedulers"])
def test_every_attribute_of_vllms_own_classes_that_ours_set_is_declared(files: tuple[str, ...]) -> None:
    source = _names_of_vllms(files)
    for where in files:
        own = {one.attr for one in assigned(PACKAGE / where) if ast.unparse(one.value) == "self"}
        theirs = {name for name in own if re.search(rf"\bself\.{name}\b", source)}
        assert {f"self.{name}" for name in theirs} <= declared(where)


def test_every_entry_has_a_kind_that_is_explained() -> None:
    assert _LEDGER.keys() - {"kinds"} == _LEDGER["kinds"].keys()


@pytest.mark.parametrize(("where", "what"), BINDINGS, ids=[": ".join(one) for one in BINDINGS])
def test_what_is_declared_stands_in_the_code(where: str, what: str) -> None:
    text = (PACKAGE / where).read_text(encoding="utf-8")
    assert what.removesuffix("...)") in re.sub(r"\s+", " ", text)
