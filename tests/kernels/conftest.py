"""Kernels run on the GPU where there is one, else on the CPU in Triton's interpreter."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bench.runner.interpreter import give_log1p
from tests.interpreted import fix_products, leave_out_what_nobody_reads, patch_language_once
from tests.versions import trees

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None


if HAS_TRITON and not HAS_GPU:
    # before anything imports Triton; these tests have a process of their own (tests/conftest.py)
    os.environ["TRITON_INTERPRET"] = "1"
    fix_products()
    patch_language_once()
    leave_out_what_nobody_reads()
    give_log1p()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def stock_gumbel() -> ModuleType:
    """vLLM's own sampling kernels, compiled or interpreted like ours.

    vLLM switches Triton off on a CPU. Its file is therefore loaded by itself, with the real Triton in the place of the
    switched-off one, which the rest of vLLM in this process keeps.
    """
    pytest.importorskip("vllm", reason="compares with vLLM, which is not installed")
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    return load_gumbel(Path(spec.submodule_search_locations[0]))


@pytest.fixture(scope="session")
def stock_philox() -> ModuleType:
    """The same of the last version that drew from Philox streams, if its tree is here."""
    if reason := trees.missing("0.29.0"):
        pytest.skip(reason)
    return load_gumbel(trees.FOLDER / "0.29.0" / "vllm")


def load_gumbel(package: Path) -> ModuleType:
    """The sampling kernels of the vLLM that is in this folder."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    path = package.joinpath("v1", "worker", "gpu", "sample", "gumbel.py")
    gumbel_spec = importlib.util.spec_from_file_location("stock_gumbel", path)
    assert gumbel_spec is not None and gumbel_spec.loader is not None
    module = importlib.util.module_from_spec(gumbel_spec)
    importlib.import_module("triton.language")
    device = importlib.import_module("triton.language.extra.libdevice")
    shown = SimpleNamespace(triton=triton, tl=triton.language, tldevice=device, HAS_TRITON=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm.triton_utils", shown)
        gumbel_spec.loader.exec_module(module)
    return module
