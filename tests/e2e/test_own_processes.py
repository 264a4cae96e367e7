"""The tests whose imports must see a Triton that interprets; they run beside all others, and these wait for them."""

from __future__ import annotations

import pytest

from tests.own_processes import FOLDERS

pytest.importorskip("vllm")
pytest.importorskip("triton")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_passes_its_tests_under_tritons_interpreter(folder: str, pytestconfig: pytest.Config) -> None:
    done = pytestconfig.own_processes.result(folder)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-8000:]
