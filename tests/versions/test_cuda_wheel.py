"""Code that runs on a GPU alone calls vLLM as it is, and vLLM's Python is the same there as here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.versions import cuda_wheel, trees
from tests.versions.signatures import Ours, Tree
from vllm_specrollout.patches import features, supported
from vllm_specrollout.patches.features import Features

ROW = features.TABLE[supported.USUAL]


def ours_for(row: Features) -> list[Ours]:
    return [
        Ours(file, row)
        for folder in ("worker/v2", "worker", "worker/models", "server", "patches")
        for file in sorted(trees.ROOT.joinpath("vllm_specrollout", folder).glob("*.py"))
    ]


FILES = ours_for(ROW)


@pytest.fixture(params=["cpu", "cuda"])
def stock(request: pytest.FixtureRequest) -> Iterator[Tree]:
    """The source of vLLM as released for CPU, and for CUDA where it is unpacked."""
    if request.param == "cuda" and (reason := cuda_wheel.missing()):
        pytest.skip(reason)
    pytest.importorskip("vllm")
    root = Path(str(supported._module_file("vllm"))).parents[1]
    yield Tree(root if request.param == "cpu" else cuda_wheel.FOLDER / supported.USUAL)


def test_all_that_is_called_of_vllm_is_there_and_takes_what_it_is_given(stock: Tree) -> None:
    assert [problem for ours in FILES for problem in ours.problems(stock)] == []


# what older versions have not, and what is not reached there
NOT_REACHED = {
    "AuxOutputWorkerConnector": "for type checkers alone",
    "PendingAuxOutput": "for type checkers alone",
    "freeze_gc_for_cudagraph_capture": "imported where drafts are captured (`captures_drafts`)",
    "SamplingMaskTensors.from_logits": "masks are refused there (`returns_masks`)",
}


@pytest.mark.parametrize("version", trees.pins())
def test_so_it_is_in_every_other_version(version: str) -> None:
    if reason := trees.missing(version):
        pytest.skip(reason)
    tree, files = Tree(trees.FOLDER / version), ours_for(features.TABLE[version])
    found = [problem for ours in files for problem in ours.problems(tree)]
    assert [problem for problem in found if not any(name in problem for name in NOT_REACHED)] == []


def test_what_runs_on_a_gpu_alone_is_among_what_is_checked(stock: Tree) -> None:
    called = {ast.unparse(call.func) for ours in FILES for call, _ in ours.calls(stock)}
    graphs = {"BatchExecutionDescriptor", "graphs.capture", "graphs.dispatch", "graphs.run_fullgraph"}
    others = {"self.inner.forward", "super().prepare_inputs"}
    assert graphs | others <= called


PLANTED = {
    "a name that is gone": ("from vllm.v1.worker.gpu.attn_utils import gone\n", "no gone"),
    "a keyword that is gone": (
        "from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor\n"
        "BatchExecutionDescriptor(cg_mode=1, num_tokens=2, num_reqs=3, width=4)\n",
        "unexpected keyword argument 'width'",
    ),
    "an argument too few": ("def f(graphs):\n    graphs.run_fullgraph()\n", "missing a required argument: 'desc'"),
    "a method that is gone": ("def f(graphs):\n    graphs.replay(1)\n", "no graphs.replay"),
    "an override of other arguments": (
        "class SpecRolloutV2:\n    def prepare_attn(self, batch):\n        return super().prepare_attn(batch)\n",
        "vLLM's own takes ['self', 'input_batch']",
    ),
}


@pytest.mark.parametrize(("source", "problem"), PLANTED.values(), ids=PLANTED)
def test_what_does_not_fit_is_found(source: str, problem: str, stock: Tree, tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text(source, encoding="utf-8")
    found = list(Ours(file, ROW).problems(stock))
    assert len(found) == 1 and problem in found[0]


def test_what_is_for_another_version_is_not_checked(stock: Tree, tmp_path: Path) -> None:
    for choice, problems in (("captures_drafts", 0), ("v2_noise", 1)):
        file = tmp_path / f"{choice}.py"
        file.write_text(
            f"def f(graphs):\n    if features.installed().{choice} not in (True, 'philox'):\n        graphs.replay(1)\n"
        )
        assert len(list(Ours(file, ROW).problems(stock))) == problems


def test_all_python_of_vllms_is_the_same_for_cuda() -> None:
    """So what tests run on a CPU is what runs on a GPU, but for what is compiled and what only CPUs run."""
    if reason := cuda_wheel.missing():
        pytest.skip(reason)

    def sources(package: Path) -> dict[str, bytes]:
        return {str(file.relative_to(package)): file.read_bytes() for file in package.rglob("*.py")}

    cpu, cuda = (
        sources(Path(str(supported._module_file("vllm"))).parent),
        sources(cuda_wheel.FOLDER / supported.USUAL / "vllm"),
    )
    differing = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    # how vLLM finds its own version, and stand-ins for Triton's kernels on a CPU
    assert differing == {"_version.py", "platforms/__init__.py", "utils/cpu_triton_utils.py"}
    assert cpu.keys() <= cuda.keys()
