import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit import ceilings
from tests.unit.ceilings import sources

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_specrollout"
TOPS = ("kernels", "patches", "bench", "packages")
MAPPED = sorted(init.parent.relative_to(ROOT) for top in TOPS for init in ROOT.glob(f"{top}/*/__init__.py"))
# folders that may import vLLM; everything else may not
USES_VLLM = (PACKAGE / "worker", PACKAGE / "server", PACKAGE / "bench", ROOT / "bench", ROOT / "patches")


def imports(path: Path) -> set[str]:
    """Top-level names a file imports, wherever in it, but for type checking alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.dump(test.test)
        for node in ast.walk(test)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("folder", MAPPED, ids=str)
def test_every_inner_folder_is_importable_under_its_mapped_name(folder):
    name = f"vllm_specrollout.{'.'.join(folder.parts)}".replace(".packages.", ".bench.")
    spec = importlib.util.find_spec(name)
    assert spec is not None, "run `pip install --no-deps --no-build-isolation -e .` again: a new folder needs it"
    assert Path(spec.origin).resolve() == ROOT / folder / "__init__.py"


def test_no_top_level_folder_is_a_package_that_could_shadow_another():
    assert not [top for top in TOPS if (ROOT / top / "__init__.py").exists()]


def test_importing_us_imports_neither_vllm_nor_torch_and_shadows_nothing():
    code = "import sys, vllm_specrollout; print({'vllm', 'torch', 'numpy', 'kernels', 'patches'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "set()\n"


def test_only_the_worker_the_server_and_patches_import_vllm():
    others = [path for path in sources() if not any(path.is_relative_to(folder) for folder in USES_VLLM)]
    assert len(others) > 100 and not [path for path in others if "vllm" in imports(path)]


def test_ray_is_imported_where_groups_are_placed_and_nowhere_else():
    users = {path.parent.relative_to(PACKAGE).as_posix() for path in sources() if "ray" in imports(path)}
    assert users == {"cluster/ray"}


def test_studies_need_neither_an_engine_nor_torch():
    used = set().union(*(imports(path) for path in (ROOT / "packages" / "studies").glob("*.py")))
    assert "vllm_specrollout" in used and not used & {"vllm", "torch", "triton"}


def test_all_that_is_logged_goes_through_one_logger_that_vllm_shows():
    # a child of vLLM's own logger: its handler, its level and its format hold without a line of ours
    made = re.compile(r"(?:getLogger|init_logger)\(([^)]*)\)")
    found = {name for path in sources() for name in made.findall(path.read_text(encoding="utf-8"))}
    assert found == {'"vllm.specrollout"'}


def test_a_patch_file_only_rebinds_and_stays_within_forty_lines():
    for path in ROOT.glob("patches/*/patch_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        assert defined == [], f"{path.name}: behaviour belongs in vllm_specrollout/server or worker"
        assert len(path.read_text().splitlines()) <= 40, path.name


def test_files_and_functions_stay_readable_in_size():
    for path in sources():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 500, path
        functions = [
            one for one in ast.walk(ast.parse(text)) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        # a kernel is one long function by nature: what it keeps in registers cannot be handed around
        most = 120 if path.is_relative_to(ROOT / "kernels") else 50
        # a command's signature is its list of flags, so only the body counts
        assert not [one.name for one in functions if one.end_lineno - one.body[0].lineno >= most], path


def test_no_folder_has_more_statements_and_no_further_name_is_two_classes():
    found = ceilings.above(ceilings.flat(ceilings.measured()), ceilings.flat(ceilings.table()))
    assert not found, f"{found}; hint: delete elsewhere in the folder, or name the class after what it is"


def test_the_ceilings_fall_with_the_code():
    found = ceilings.below(ceilings.flat(ceilings.measured()), ceilings.flat(ceilings.table()))
    assert not found, f"{found}; hint: run `python -m tests.unit.ceilings --update`"


def test_statements_are_counted_without_imports_docstrings_and_layout(tmp_path):
    file = tmp_path / "one.py"
    file.write_text(
        '"""Head."""\nimport os\n\ndef f(\n    a,\n):\n    """Says."""\n    if a:\n        return os\n    return 1\n'
    )
    assert ceilings.statements(file) == 4
    assert ceilings.above({"core/new": 1, "class Row": 3}, {"class Row": 2}) == [
        "core/new: 1, above 0",
        "class Row: 3, above 2",
    ]
    assert ceilings.below({"core/a": 980, "core/b": 979}, {"core/a": 1000, "core/b": 1000, "class Row": 2}) == [
        "core/b: 979, far below 1000",
        "class Row: 0, far below 2",
    ]


def test_no_comment_and_no_page_names_a_file_that_is_gone():
    """Files of ours or of vLLM's, by their name alone or by a path; folders in the map of CONTRIBUTING.md."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        pytest.skip("no vLLM here, whose files comments name too")
    theirs = Path(vllm.origin).parent
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True)
    ours = [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]
    paths = [f"/{path.relative_to(ROOT)}" for path in ours] + [
        f"/vllm/{p.relative_to(theirs)}" for p in theirs.rglob("*")
    ]
    # `a/b.py` stands for any path that ends so, `b.py` for any file of that name
    known = {path[i:] for path in paths for i, letter in enumerate(path) if letter == "/"}
    known |= {f"/{folder}/" for path in paths for folder in path.split("/")[1:-1]}
    left_out = ("docs/reference/", "docs/adr/", "CHANGELOG", "tests/", "setup.py")
    stale = []
    for path in ours:
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in (".py", ".md") or name.startswith(left_out):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            named = [f"/{word}" for word in re.findall(r"(?<![\w./-])\w[\w/-]*\.py\b", line)]
            named += [f"/{word}" for word in re.findall(r"`(\w+/)`", line) if name == "CONTRIBUTING.md"]
            stale += [f"{name}:{number}: {word[1:]}" for word in named if word not in known]
    assert stale == []
