"""Other weights for the model that drafts, while requests run.

What belongs here: what is checked before a weight is touched, and how vLLM's own reloading brings the new ones in. The
running drafter either goes on with its old weights, or has all the new ones, or is switched off.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.guard import CONTAINED

_OF_TRAINING = ("t2d", "verifier_norm", "verifier_lm_head")
"""Tensors of a checkpoint that vLLM leaves unread."""
_FREE = (
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "speculators_version",
    "speculators_config",
    "dtype",
    "torch_dtype",
)
"""Keys of a configuration that say nothing of the weights' shapes."""

Shapes = dict[str, tuple[int, ...]]


def swap(runner: Any, path: Path) -> dict[str, Any]:
    """Load other weights of the same shape into the model that drafts.

    Args:
        runner: our V1 runner, between two steps.
        path: a folder with config.json and safetensors, as the drafter was started with; or one safetensors file.

    Returns:
        "tensors": how many were read, and "version": how often weights were swapped.

    Raises:
        ConfigError, UnsupportedError: the weights cannot be used; the drafter goes on with its own.
    """
    drafter = runner.model_drafter
    if drafter is None:
        raise ConfigError(
            "no model drafts in this engine", "start it with a `speculative_config`; a failed one stays off"
        )
    proposer = drafter.proposer.of_vllm
    config = proposer.vllm_config.speculative_config.draft_model_config
    first = drafter.proposer.path
    files = _files(path)
    _check_config(first, path)
    shared = _shared_modules(proposer.model, runner.get_model())
    weights = _read(files, _shapes(_files(first), first), path, shared.keys())
    for name, module in shared.items():
        _check_shared(name, module, weights, path)
    kept = {name: one for name, one in weights.items() if not shared.keys() & set(name.split("."))}
    try:
        with set_current_vllm_config(proposer.vllm_config), _without(proposer.model, shared), torch.no_grad():
            initialize_layerwise_reload(proposer.model)
            proposer.model.load_weights(iter(kept.items()))
            finalize_layerwise_reload(proposer.model, config)
    except CONTAINED as error:
        # half old and half new is worse than none
        runner.model_drafter = None
        runner.spec_rollout.drop(drafter, error)
        raise ConfigError(
            f"`{path}` could not be loaded: {error}", "the drafter is off; start the engine anew"
        ) from error
    drafter.begin_anew()
    runner.spec_rollout.worth.drop(drafter.name)
    runner.spec_rollout.budget.renewed(drafter.source, drafter.num_sources)
    return {"tensors": len(kept), "version": drafter.version}


def _files(path: Path) -> list[Path]:
    try:
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{path}` cannot be looked into: {error}", "give a path that the engine can read") from None
    if not files:
        raise ConfigError(
            f"`{path}` holds no safetensors", "give a folder that `specrollout train-head` wrote, or a file"
        )
    return files


def _check_config(first: Path, path: Path) -> None:
    """The new weights' configuration says what the old ones' says, if they have one."""
    try:
        old, new = (json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (first, path))
    except (OSError, ValueError):
        return
    names = sorted((old.keys() | new.keys()) - set(_FREE))
    differ = [name for name in names if old.get(name) != new.get(name)]
    if differ:
        told = "; ".join(f"{name} is {new.get(name)!r}, was {old.get(name)!r}" for name in differ[:3])
        raise ConfigError(f"`{path}` is another kind of drafter: {told}", "start the engine anew with it")


def _shapes(files: list[Path], path: Path) -> Shapes:
    try:
        shapes: Shapes = {}
        for file in files:
            with safe_open(file, "pt") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"`{path}` cannot be read: {error}", "give a whole checkpoint in safetensors") from None
    return {name: shape for name, shape in shapes.items() if not any(part in name for part in _OF_TRAINING)}


def _read(files: list[Path], wanted: Shapes, path: Path, shared: Collection[str]) -> dict[str, torch.Tensor]:
    """The tensors, all that are wanted and no others, each in its shape.

    Args:
        shared: parts that are the target's own; only their tensors may be left out, or be there in addition.
    """
    found = _shapes(files, path)
    missing, unknown = (
        [name for name in sorted(names) if not set(shared) & set(name.split("."))]
        for names in (wanted.keys() - found.keys(), found.keys() - wanted.keys())
    )
    wrong = [
        f"{name} is {found[name]}, not {wanted[name]}"
        for name in sorted(found.keys() & wanted.keys())
        if found[name] != wanted[name]
    ]
    if missing or unknown or wrong:
        told = [
            f"{what}: {', '.join(names[:3])}"
            for what, names in (("missing", missing), ("unknown", unknown), ("shape", wrong))
            if names
        ]
        raise ConfigError(
            f"`{path}` does not fit the drafter that runs; {'; '.join(told)}", "start the engine anew with it"
        )
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            weights |= {name: opened.get_tensor(name) for name in opened.keys() if name in found}  # noqa: SIM118
    return weights


def _shared_modules(model: Any, target: Any) -> dict[str, torch.nn.Module]:
    """Parts of the drafter that are the target's own, by their last name: nothing may be written into them.

    A head may share its embedding and its output head, and vLLM has one module of rotary embeddings for all models of a
    shape.
    """
    own = {id(module) for module in target.modules()}
    return {name.rpartition(".")[2]: module for name, module in model.named_modules() if id(module) in own}


def _check_shared(name: str, module: torch.nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Weights for a shared module must be the target's; those of its embedding follow the policy, and are left out."""
    given = weights.get(f"{name}.weight")
    if given is None or name != "lm_head":
        return
    weight = getattr(module, "weight", None)
    if weight is None or weight.numel() == 0 or not torch.equal(weight[: len(given)].cpu(), given.to(weight.dtype)):
        raise UnsupportedError(
            f"`{path}` brings an output head, and the drafter that runs shares its target's",
            "start the engine anew with it; from then on, others can be swapped in",
        )


@contextlib.contextmanager
def _without(model: Any, shared: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """The model as if it had no part of the target, so that reloading cannot touch that."""
    own = {id(module) for module in shared.values()}
    places = [(owner, name, one) for owner in model.modules() for name, one in owner.named_children() if id(one) in own]
    for owner, name, _ in places:
        del owner._modules[name]
    try:
        yield
    finally:
        for owner, name, one in places:
            owner._modules[name] = one
