"""Whether code of ours that runs on a GPU alone calls vLLM as it is: read from both sources, nothing is imported.

Three things are read out of our files: which names of vLLM's they import, how they call those, and how methods of
vLLM's are called through `super()` or an object of `RECEIVERS`. A call with `*args` is checked as far as it is written
out.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from vllm_specrollout.patches import features

# an object's name in our source -> its class; what is not named here is not checked
RECEIVERS = {
    "graphs": "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager",
    "self.stock": "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager",
    "self.inner": "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",
    "self.structured_outputs_worker": "vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker",
    "sampler": "vllm.v1.worker.gpu.sample.sampler:Sampler",
    "self.sampler": "vllm.v1.worker.gpu.sample.sampler:Sampler",
    "SamplingMaskTensors": "vllm.v1.worker.gpu.sample.output:SamplingMaskTensors",
}
# what our mixins become a subclass of
BASES = {
    "SpecRolloutV2": "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
    "Lane": "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
    "SpeculatingWorker": "vllm.v1.worker.gpu_worker:Worker",
}


@dataclass(frozen=True, slots=True)
class Tree:
    """vLLM's source in a folder."""

    root: Path

    def module(self, name: str) -> ast.Module | None:
        base = self.root.joinpath(*name.split("."))
        path = next((one for one in (base.with_suffix(".py"), base / "__init__.py") if one.is_file()), None)
        return _parsed(path) if path is not None else None

    def find(self, module: str, name: str) -> tuple[str, ast.stmt | None] | None:
        """(module, definition) of a name; the definition is None where it is a module or a plain value."""
        parsed = self.module(module)
        if parsed is None:
            return None
        for node in ast.walk(parsed):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module and (node.module, name) != (module, name):
                source = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), None)
                if source is not None:
                    return self.find(node.module, source) or (module, None)
        # plain values, names made by a module's `__getattr__`, submodules
        is_named = any(isinstance(node, ast.Name | ast.Constant) and name in _texts(node) for node in ast.walk(parsed))
        return (module, None) if is_named or self.module(f"{module}.{name}") is not None else None

    def method(self, target: str, name: str) -> ast.FunctionDef | None:
        """A class's own or inherited method."""
        found = self.find(*target.split(":"))
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        module, class_ = found
        own = [node for node in class_.body if isinstance(node, ast.FunctionDef) and node.name == name]
        if own:
            return own[-1]
        bases = (base.value if isinstance(base, ast.Subscript) else base for base in class_.bases)
        inherited = (self.method(f"{module}:{base.id}", name) for base in bases if isinstance(base, ast.Name))
        return next((node for node in inherited if node is not None), None)

    def parameters(self, module: str, name: str) -> inspect.Signature | None:
        """What a function or a class takes when it is called; None: it is neither."""
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.FunctionDef | ast.ClassDef):
            return None
        if isinstance(found[1], ast.FunctionDef):
            return _signature(found[1])
        init = self.method(f"{found[0]}:{name}", "__init__")
        if init is not None:
            return _signature(init, is_bound=True)
        # a dataclass, or a named tuple
        of_any, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        fields = [node for node in found[1].body if isinstance(node, ast.AnnAssign)]
        given = [(ast.unparse(field.target), empty if field.value is None else None) for field in fields]
        return inspect.Signature([inspect.Parameter(field, of_any, default=default) for field, default in given])


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _texts(node: ast.Name | ast.Constant) -> tuple[str, ...]:
    return (node.id,) if isinstance(node, ast.Name) else (str(node.value),)


def _signature(node: ast.FunctionDef, is_bound: bool = False) -> inspect.Signature:
    kinds = inspect.Parameter
    given, found = node.args, []
    positional = [*given.posonlyargs, *given.args]
    defaults = len(positional) - len(given.defaults)
    for index, one in enumerate(positional):
        default = None if index >= defaults else kinds.empty
        found.append(kinds(one.arg, kinds.POSITIONAL_OR_KEYWORD, default=default))
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if is_bound and "staticmethod" not in decorators:
        found = found[1:]
    if given.vararg:
        found.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for one, default_of in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(kinds(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default_of is None else None))
    if given.kwarg:
        found.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)


@dataclass(frozen=True, slots=True)
class Ours:
    """A file of ours as it runs with the version of vLLM that this row of `features.TABLE` describes."""

    file: Path
    row: features.Features

    def problems(self, tree: Tree) -> Iterator[str]:
        """What it names, calls or overrides of vLLM's otherwise than it is in that tree."""
        for module, name in self._imported().values():
            if tree.find(module, name) is None:
                yield f"{self.file.name}: no {name} in {module}"
        for call, signature in self.calls(tree):
            if signature is None:
                yield f"{self._at(call)}: no {ast.unparse(call.func)}"
            elif problem := _misfit(call, signature):
                yield f"{self._at(call)}: {ast.unparse(call.func)}: {problem}"
        yield from self._overrides(tree)

    def _imported(self) -> dict[str, tuple[str, str]]:
        """Name here -> (module, name there) of all that is vLLM's."""
        return {
            alias.asname or alias.name: (str(node.module), alias.name)
            for node, _ in self._nodes()
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
            for alias in node.names
        }

    def calls(self, tree: Tree) -> Iterator[tuple[ast.Call, inspect.Signature | None]]:
        """Its calls of what it imported, and of methods whose class is known; None: there is no such method."""
        imported = self._imported()
        for call, owner in self._nodes():
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func)
            if name in imported:
                if (signature := tree.parameters(*imported[name])) is not None:
                    yield call, signature
            elif isinstance(call.func, ast.Attribute) and (target := _receiver(call.func, owner, imported)):
                method = tree.method(target, call.func.attr)
                # what `super()` of a mixin has besides is not vLLM's
                if method is not None or not name.startswith("super()"):
                    yield call, method and _signature(method, is_bound=True)

    def _overrides(self, tree: Tree) -> Iterator[str]:
        """Methods of mixins that cannot be called as vLLM's own of the same name are."""
        for owner, _ in self._nodes():
            if not isinstance(owner, ast.ClassDef) or owner.name not in BASES:
                continue
            for ours in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
                stock = tree.method(BASES[owner.name], ours.name)
                if stock is None or ours.name.startswith("__"):
                    continue
                rest = {kind for one in _signature(ours).parameters.values() if (kind := one.kind) in _REST}
                named, wanted = _named(ours), _named(stock)
                if named != (wanted[: len(named)] if rest else wanted):
                    yield f"{self._at(ours)}: {ours.name} takes {named}, and vLLM's own takes {wanted}"

    def _nodes(self) -> Iterator[tuple[ast.AST, ast.ClassDef | None]]:
        """Everything in it with the class that it stands in, but for what is for other versions."""
        for statement in _parsed(self.file).body:
            owner = statement if isinstance(statement, ast.ClassDef) else None
            waiting: list[ast.AST] = [statement]
            while waiting:
                node = waiting.pop()
                yield node, owner
                skipped = self._dead(node) if isinstance(node, ast.If | ast.IfExp) else []
                waiting += [child for child in ast.iter_child_nodes(node) if child not in skipped]

    def _dead(self, choice: ast.If | ast.IfExp) -> list[ast.AST]:
        """The branch of a choice between versions that this one does not take."""
        test = ast.unparse(choice.test)
        if not re.search(r"\bfeatures\.installed\(\)", test):
            return []
        shown = SimpleNamespace(installed=lambda: self.row)
        try:
            taken = eval(test, {"features": shown})
        except (NameError, AttributeError):  # a choice between other things as well
            return []
        branch = choice.orelse if taken else choice.body
        return branch if isinstance(branch, list) else [branch]

    def _at(self, node: ast.AST) -> str:
        return f"{self.file.name}:{node.lineno}"  # type: ignore[attr-defined]


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _named(node: ast.FunctionDef) -> list[str]:
    return [one.arg for one in [*node.args.posonlyargs, *node.args.args]]


def _receiver(called: ast.Attribute, owner: ast.ClassDef | None, imported: dict[str, tuple[str, str]]) -> str | None:
    """The class of vLLM's that a method is called of."""
    of = ast.unparse(called.value)
    if of != "super()" or owner is None:
        return RECEIVERS.get(of)
    named = [ast.unparse(base) for base in owner.bases if ast.unparse(base) in imported]
    return BASES.get(owner.name) or (":".join(imported[named[0]]) if named else None)


def _misfit(call: ast.Call, signature: inspect.Signature) -> str:
    """Why the call would fail; empty: it would not."""
    positional = [one for one in call.args if not isinstance(one, ast.Starred)]
    keywords = {one.arg: one for one in call.keywords if one.arg is not None}
    is_whole = len(positional) == len(call.args) and len(keywords) == len(call.keywords)
    bind = signature.bind if is_whole else signature.bind_partial
    try:
        bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return ""
