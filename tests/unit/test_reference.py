import importlib.util
from pathlib import Path

import pytest

GENERATOR = Path(__file__).resolve().parents[2] / "docs" / "reference" / "generate.py"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_reference", GENERATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_pages_are_those_the_code_would_write(generator):
    for name, text in generator.pages().items():
        assert (GENERATOR.parent / name).read_text(encoding="utf-8") == text, "run `make docs`"


def test_the_map_of_contributors_has_every_folder_of_the_package(generator):
    package = GENERATOR.parents[2] / "vllm_specrollout"
    folders = {path.parent.name for path in package.glob("*/__init__.py")} - {"bench", "kernels"}
    assert folders and all(f"| `{name}/` | " in generator.map_of_folders() for name in folders)


def test_every_configuration_key_has_a_meaning(generator):
    from vllm_specrollout import config

    for cls in (config.SpecRolloutConfig, config.NgramConfig, config.RequestOptions):
        for row in generator._fields(cls, ""):
            assert row[-1].strip()
