"""The tests that run in processes of their own, beside all others; these here wait for them."""

from __future__ import annotations

import pytest

from tests.own_processes import FOLDERS

pytest.importorskip("vllm")
pytest.importorskip("triton")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("folder", FOLDERS)
def test_what_runs_in_a_process_of_its_own_passes(folder: str, pytestconfig: pytest.Config) -> None:
    done = pytestconfig.own_processes.result(folder)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-8000:]
