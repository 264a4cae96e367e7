"""What is said of a tree of vLLM's source that our code was not written against."""

import ast
import shutil

import pytest

from tests.versions.drift import drift
from vllm_specrollout.patches import supported

VERSION = supported.USUAL
CHANGED = "vllm.v1.engine.input_processor:InputProcessor.process_inputs"
GONE = "vllm.v1.metrics.loggers:PrometheusStatLogger.__init__"


@pytest.fixture
def tree(tmp_path):
    """The installed vLLM's files that hold what we lean on."""
    for module in supported.table()[VERSION]["files"]:
        path = supported._module_file(module)
        folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
        target = tmp_path.joinpath(*folder.split("."), path.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return tmp_path


def test_the_source_that_is_known_has_drifted_nowhere(tree):
    assert drift(VERSION, tree) == ([], [])


def test_a_definition_that_changed_and_one_that_is_gone_are_told_apart(tree):
    path = tree / "vllm/v1/engine/input_processor.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    (outer,) = [one for one in ast.parse("\n".join(lines)).body if getattr(one, "name", "") == "InputProcessor"]
    (inner,) = [one for one in outer.body if getattr(one, "name", "") == "process_inputs"]
    lines.insert(inner.body[0].lineno - 1, " " * inner.body[0].col_offset + "drifted = True")
    path.write_text("\n".join(lines), encoding="utf-8")
    (tree / "vllm/v1/metrics/loggers.py").unlink()
    changed, gone = drift(VERSION, tree)
    assert changed == [CHANGED]
    assert GONE in gone and all(target.startswith("vllm.v1.metrics.loggers:") for target in gone)
