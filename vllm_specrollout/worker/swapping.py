"""Other weights for the model that drafts, while requests run.

What belongs here: what is checked before a weight is touched, and how vLLM's own reloading brings the new ones in. The
running drafter either goes on with its old weights, or has all the new ones, or is switched off.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from vllm_specrollout.errors import ConfigError, UnsupportedError, shown
from vllm_specrollout.guard import CONTAINED
from vllm_specrollout.worker.checkpoint import FLOATING, Checkpoint, Stored, configuration, opened

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

_HEAD = "lm_head.weight"
_MAP = "d2t"
"""What must be added to a token of a smaller vocabulary to have the target's."""


def swap(runner: Any, path: Path, below: Path | None = None, *, is_new: bool = True) -> dict[str, Any]:
    """Load other weights of the same shape into the model that drafts.

    Args:
        runner: our V1 runner, between two steps.
        path: a folder with config.json and safetensors, as the drafter was started with; or one safetensors file.
        below: the folder out of which nothing is read, links followed; a `path` that is not absolute lies in it.
        is_new: False: the drafter had these before; whether they can draft is not asked again.

    Returns:
        "tensors": how many were read, and "version": how often weights were swapped.

    Raises:
        ConfigError, UnsupportedError: the weights cannot be used; the drafter goes on with its own.
        ForbiddenError: they lie outside of `below`; likewise.
    """
    drafter = runner.model_drafter
    if drafter is None:
        raise ConfigError(
            "no model drafts in this engine", "start it with a `speculative_config`; a failed one stays off"
        )
    proposer = drafter.proposer.of_vllm
    config = proposer.vllm_config.speculative_config.draft_model_config
    shared = _shared_modules(proposer.model, runner.get_model())
    kept = _read(drafter.proposer.path, path, below, shared, is_new)
    if is_new:
        _check_drafts(kept, path, proposer.vllm_config.model_config.get_vocab_size())
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


def _read(
    first: Path, path: Path, below: Path | None, shared: Mapping[str, torch.nn.Module], is_new: bool
) -> dict[str, torch.Tensor]:
    """The drafter's own tensors, once all that is said of them fits the folder that it was started with."""
    _check_config(first, path, below)
    with opened(first) as old, opened(path, below) as new:
        found, wanted = (
            {name: one for name, one in both.stored.items() if not any(part in name for part in _OF_TRAINING)}
            for both in (new, old)
        )
        wrong = _misfits(found, wanted, shared.keys())
        if is_new:
            wrong["dtype"] = [
                f"{name} is {one.dtype}" for name, one in sorted(found.items()) if not _is_float(name, one)
            ]
        told = [f"{what}: {', '.join(names[:3])}" for what, names in wrong.items() if names]
        if told:
            cause = f"`{path}` does not fit the drafter that runs; {'; '.join(told)}"
            raise ConfigError(cause, f"start the engine anew with it; weights are of dtype {', '.join(FLOATING)}")
        if (head := shared.get("lm_head")) is not None:
            _check_shared(head, new, path)
        return new.read(name for name in found if not _is_of(shared, name))


def _check_config(first: Path, path: Path, below: Path | None) -> None:
    """The new weights' configuration says what the old ones' says, if they have one."""
    new, old = configuration(path, below), configuration(first)
    if old is None or new is None:
        return
    names = sorted((old.keys() | new.keys()) - set(_FREE))
    differ = [name for name in names if old.get(name) != new.get(name)]
    if differ:
        # the old one lies anywhere, and is not for whoever is told of one folder
        was = [f", was {shown(old.get(name))}" if below is None else "" for name in differ[:3]]
        told = "; ".join(f"{name} is {shown(new.get(name))}{more}" for name, more in zip(differ, was, strict=False))
        raise ConfigError(f"`{path}` is another kind of drafter: {told}", "start the engine anew with it")


def _misfits(
    found: Mapping[str, Stored], wanted: Mapping[str, Stored], shared: Collection[str]
) -> dict[str, list[str]]:
    """What must be the same and is not.

    Args:
        shared: parts that are the target's own; only their tensors may be left out, or be there in addition.
    """
    missing, unknown = (
        [name for name in sorted(names) if not _is_of(shared, name)]
        for names in (wanted.keys() - found.keys(), found.keys() - wanted.keys())
    )
    shapes = [
        f"{name} is {found[name].shape}, not {wanted[name].shape}"
        for name in sorted(found.keys() & wanted.keys())
        if found[name].shape != wanted[name].shape
    ]
    return {"missing": missing, "unknown": unknown, "shape": shapes}


def _is_float(name: str, one: Stored) -> bool:
    return one.dtype in FLOATING or (name == _MAP and one.dtype == "I64")


def _check_drafts(weights: Mapping[str, torch.Tensor], path: Path, vocabulary: int) -> None:
    """Refuse values that no training leaves: of a copy in progress, a run that diverged, or a file's holes.

    A vector of zeros is a fine bias; a matrix of zeros passes nothing on.
    """
    told = []
    for name, weight in weights.items():
        if not weight.numel():
            continue
        low, high = (value.item() for value in weight.aminmax())
        if name == _MAP:
            targets = weight + torch.arange(len(weight))
            if int(targets.min()) < 0 or int(targets.max()) >= vocabulary:
                told.append(f"{name} leads out of the vocabulary of {vocabulary}")
        elif not math.isfinite(low) or not math.isfinite(high):
            told.append(f"{name} has values that are not finite")
        elif low == high == 0 and weight.ndim > 1:
            told.append(f"{name} is all zeros")
    if told:
        raise ConfigError(
            f"`{path}` cannot draft: {'; '.join(told[:3])}",
            "give weights that were trained, whole; write them aside, then rename them",
        )


def _is_of(parts: Collection[str], name: str) -> bool:
    return any(part in parts for part in name.split("."))


def _shared_modules(model: Any, target: Any) -> dict[str, torch.nn.Module]:
    """Parts of the drafter that are the target's own, by their last name: nothing may be written into them.

    A head may share its embedding and its output head, and vLLM has one module of rotary embeddings for all models of a
    shape.
    """
    own = {id(module) for module in target.modules()}
    return {name.rpartition(".")[2]: module for name, module in model.named_modules() if id(module) in own}


def _check_shared(module: torch.nn.Module, checkpoint: Checkpoint, path: Path) -> None:
    """The output head, if there is one for a shared module, must be the target's; an embedding follows the policy, and
    is left out.
    """
    stored, weight = checkpoint.stored.get(_HEAD), getattr(module, "weight", None)
    if stored is None:
        return
    # the module's own may be padded
    if weight is not None and weight.numel() and stored.dtype in FLOATING:
        rows, *rest = stored.shape or (0,)
        if rows <= len(weight) and rest == list(weight.shape[1:]):
            given = checkpoint.read([_HEAD])[_HEAD]
            if torch.equal(weight[:rows].cpu(), given.to(weight.dtype)):
                return
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
