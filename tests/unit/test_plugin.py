import logging
import sys
from dataclasses import replace

import pytest

from vllm_specrollout import patches, plugin
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.patches import Patch, PatchConflict, supported

TOY = """
class Base:
    def inherited(self):
        return "stock"

class Toy(Base):
    def method(self):
        return "stock"

    @staticmethod
    def static():
        return "stock"

    @classmethod
    def of_class(cls):
        return "stock " + cls.__name__

def function():
    return "stock"
"""


@pytest.fixture(autouse=True)
def _separate_patches():
    """The patches of the running process are set aside, so that a toy's do not mix with vLLM's."""
    applied, waiting = dict(patches._applied), dict(patches._waiting)
    patches._applied.clear()
    patches._waiting.clear()
    yield
    supported.table.cache_clear()
    patches.undo_all()
    patches._applied.update(applied)
    patches._waiting.update(waiting)
    if waiting:
        sys.meta_path.insert(0, patches._arrival)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    name = f"toy_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    patches.undo_all()
    sys.modules.pop(name, None)


def declare(target: str, why: str = "to test") -> Patch:
    own = {"target": target, "wrap": lambda original: lambda *args: f"ours over {original(*args)}", "why": why}
    return Patch(**own, upstream="", versions=("0",), remove_when="never", process="frontend")


def test_a_patch_waits_with_the_import_hook_until_somebody_imports_its_module(toy):
    patch = declare(f"{toy}:Toy.method")
    for _ in range(2):
        patches.apply(patch)
        assert patches.state(patch) == "waiting" and toy not in sys.modules and patches._arrival in sys.meta_path
    module = __import__(toy)
    assert patches.state(patch) == "applied" and patches._arrival not in sys.meta_path
    patches.apply(patch)
    assert module.Toy().method() == "ours over stock", "patched once"


def test_of_a_module_that_is_already_imported_static_and_class_methods_stay_what_they_are(toy):
    module = __import__(toy)
    for name in ("function", "Toy.static", "Toy.of_class"):
        patches.apply(declare(f"{toy}:{name}"))
    assert module.function() == "ours over stock"
    assert module.Toy.static() == module.Toy().static() == "ours over stock"
    assert module.Toy.of_class() == module.Toy().of_class() == "ours over stock Toy"


def test_patching_an_inherited_method_leaves_its_base_alone(toy):
    module = __import__(toy)
    patches.apply(declare(f"{toy}:Toy.inherited"))
    assert module.Toy().inherited() == "ours over stock" and module.Base().inherited() == "stock"
    patches.undo_all()
    assert "inherited" not in vars(module.Toy)


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_second_patch_of_the_same_name_is_refused_and_names_the_first(toy, is_imported):
    if is_imported:
        __import__(toy)
    patches.apply(declare(f"{toy}:Toy.method", why="the first owner"))
    with pytest.raises(PatchConflict, match="the first owner"):
        patches.apply(declare(f"{toy}:Toy.method", why="the second"))


def test_undoing_puts_the_very_originals_back(toy):
    module = __import__(toy)
    before = dict(vars(module.Toy))
    for name in ("method", "static", "of_class"):
        patches.apply(declare(f"{toy}:Toy.{name}"))
    patches.undo_all()
    assert all(vars(module.Toy)[name] is before[name] for name in ("method", "static", "of_class"))
    assert patches._arrival not in sys.meta_path


def test_an_unknown_process_is_a_mistake_that_names_the_known_ones():
    with pytest.raises(ValueError, match="frontend"):
        patches.apply_all("kitchen")


def test_an_unsupported_vllm_raises_only_if_the_environment_asks_for_speculation(monkeypatch, caplog):
    applied = []
    monkeypatch.setattr(supported, "installed_vllm", lambda: "0.31.2")
    monkeypatch.setattr(patches, "apply_all", lambda process, *, guards_only=False: applied.append(guards_only))
    monkeypatch.setattr(plugin, "_has_warned", False)
    monkeypatch.delenv("VLLM_SPEC_ROLLOUT", raising=False)
    with caplog.at_level(logging.WARNING):
        plugin.register()
        plugin.register()
    assert applied == [True, True], "only the guard may be installed"
    assert [record.getMessage() for record in caplog.records] == [
        "--spec-rollout is not available: vLLM 0.31.2 is installed, but spec rollout supports only: 0.29.0, 0.31.0,"
        " 0.32.0, 0.33.0 (nearest: 0.31.0 and 0.32.0)"
    ]
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", "0")
    plugin.register()
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", "1")
    with pytest.raises(UnsupportedError, match="0.31.2"):
        plugin.register()


def test_without_vllm_registering_does_nothing(monkeypatch):
    monkeypatch.setattr(supported, "installed_vllm", lambda: None)
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", "1")
    plugin.register()
    assert not patches._applied and not patches._waiting


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.0+cu129"])
def test_local_builds_of_a_version_count_as_that_version(monkeypatch, version):
    monkeypatch.setattr(supported.importlib.metadata, "version", lambda name: version)
    assert supported.installed_vllm() == "0.32.0"
    assert supported.version_problem("0.32.0") is None


@pytest.mark.parametrize(
    ("version", "near"),
    [
        ("0.28.1", ["0.29.0"]),
        ("0.31.2", ["0.31.0", "0.32.0"]),
        ("0.32.1.dev3", ["0.32.0", "0.33.0"]),
        ("1.0", ["0.33.0"]),
        ("unknown", ["0.33.0"]),
    ],
)
def test_an_unsupported_version_is_told_its_nearest_supported_ones(version, near):
    assert supported.nearest(version) == near
    problem = supported.version_problem(version)
    assert " and ".join(near) in problem.cause and near[-1] in problem.hint


def test_a_patch_is_applied_on_the_versions_that_it_is_for_and_on_no_other(toy, monkeypatch):
    older, newer = (declare(f"{toy}:Toy.{name}") for name in ("method", "static"))
    older, newer = replace(older, versions=("1.0", "1.1")), replace(newer, versions=("1.1",))
    guard = replace(declare(f"{toy}:function"), versions=("1.1",), guards_unsupported=True)
    monkeypatch.setattr(patches, "load", lambda process: (older, newer, guard))
    monkeypatch.setattr(supported, "installed_vllm", lambda: "1.0")
    patches.apply_all("frontend")
    assert [patches.state(patch) for patch in (older, newer, guard)] == ["waiting", "off", "off"]
    assert {row["target"] for row in patches.report()} == {older.target}
    patches.apply_all("frontend", guards_only=True)
    assert patches.state(guard) == "waiting" and patches.state(newer) == "off"


def test_a_fingerprint_ignores_comments_blank_lines_and_nothing_else():
    base = "def f(a):\n    return a + 1\n"
    commented = "    # why\n    def f(a):\n\n        # how\n        return a + 1   \n"
    assert supported.normalise(base) == supported.normalise(commented)
    assert supported.normalise(base) != supported.normalise(base.replace("1", "2"))


def test_a_fingerprint_follows_qualified_names_and_says_what_is_missing(toy):
    targets = [f"{toy}:Toy.method", f"{toy}:Base.inherited", f"{toy}:Toy.gone", "no_such_module_here:f"]
    found = supported.fingerprints(targets)
    assert toy not in sys.modules, "sources are read, not imported"
    assert found[targets[0]] != found[targets[1]]
    assert found[targets[2]] == found[targets[3]] == supported.NOT_FOUND


@pytest.fixture
def recorded(toy, tmp_path, monkeypatch):
    """The toy's module, its fingerprints in a table of their own."""
    path = tmp_path / "supported_vllm.toml"
    path.write_text(f'[vllm."1.0".patched]\n[vllm."1.0".assumed]\n"{toy}:Toy.method" = ""\n')
    monkeypatch.setattr(supported, "file_path", lambda: path)
    supported.table.cache_clear()
    supported.update("1.0", [f"{toy}:function"])
    return toy


def test_a_changed_source_is_named_and_the_way_out_too(recorded, tmp_path):
    assert supported.mismatches("1.0") == []
    assert list(supported.table()["1.0"]["patched"]) == [f"{recorded}:function"]
    source = tmp_path / f"{recorded}.py"
    source.write_text(TOY.replace('return "stock"\n\n    @static', 'return "new"\n\n    @static'))
    assert supported.mismatches("1.0") == [f"{recorded}:Toy.method"]
    problem = supported.drift_problem("1.0")
    assert f"{recorded}:Toy.method" in problem.cause and "specrollout patches" in problem.hint


def test_a_definition_that_only_another_version_has_is_recorded_as_missing(recorded, tmp_path):
    (tmp_path / f"{recorded}.py").write_text(TOY.replace("def method", "def other_method"))
    supported.update("0.9", [f"{recorded}:function"])
    assert list(supported.table()) == ["0.9", "1.0"]
    assert supported.table()["0.9"]["assumed"] == {f"{recorded}:Toy.method": supported.NOT_FOUND}
    assert supported.mismatches("0.9") == []
    with pytest.raises(UnsupportedError, match="Toy.gone"):
        supported.update("0.9", [f"{recorded}:Toy.gone"])


def test_the_source_of_another_tree_is_read_where_it_lies(recorded, tmp_path):
    tree = tmp_path / "tree"
    (tree / recorded).mkdir(parents=True)
    (tree / recorded / "__init__.py").write_text(TOY)
    assert supported.mismatches("1.0", tree) == []
    (tree / recorded / "__init__.py").write_text(TOY.replace('return "stock"', 'return "new"'))
    assert set(supported.mismatches("1.0", tree)) == {f"{recorded}:Toy.method", f"{recorded}:function"}
    assert supported.mismatches("1.0") == []


def test_a_file_that_is_as_recorded_is_not_parsed_and_another_build_of_it_is(recorded, tmp_path, monkeypatch):
    parsed = []
    parse = supported._parse
    monkeypatch.setattr(supported, "_parse", lambda module, root: parsed.append(module) or parse(module, root))
    assert supported.mismatches("1.0") == [] and not parsed
    source = tmp_path / f"{recorded}.py"
    source.write_text("# of another build\n" + TOY)
    assert supported.mismatches("1.0") == [] and parsed == [recorded], "the definitions are the same"
