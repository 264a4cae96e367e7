"""Swap of a drafting model's weights while requests run: made ready beside the steps, exchanged between two of them.

What belongs here: which weights may be taken, the model's second set of tensors, and which of both serves. A thread
reads, checks, and has vLLM load into the second set. Between two steps both are exchanged, so the old weights are there
as long as the new ones are on probation (observe/heads.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import vllm.config.vllm as vllm_configs
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

from vllm_specrollout.errors import ConfigError, SpecRolloutError, UnsupportedError, logger, shown
from vllm_specrollout.observe.guard import CONTAINED
from vllm_specrollout.worker.models.checkpoint import Checkpoint, Stored, configuration, opened
from vllm_specrollout.worker.models.decoupled import cores_of_process
from vllm_specrollout.worker.models.proposing import path_of
from vllm_specrollout.worker.packed_weights import pack_tied_head

Place = tuple[Path, Path | None]
"""Where weights are, and the folder out of which nothing is read, links followed; None: they may lie anywhere."""
NICE = 10
"""Priority of the thread that makes weights ready, below that of the steps."""
_NOTHING = object()
FLOATING = ("F32", "F16", "BF16")
"""Dtypes of weights, as safetensors names them."""
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
"""Buffer of what must be added to a token of a smaller vocabulary to have the target's."""


class Twin:
    """A second set of a drafting model's own tensors, and of what vLLM makes of weights beside them.

    Args:
        model: its modules are copied without their tensors' contents being shared; those of the target are left out, as
            vLLM's reloading empties every module that it walks over.
        shared: the target's modules among them.
    """

    def __init__(self, model: torch.nn.Module, shared: Mapping[str, torch.nn.Module]) -> None:
        self._shared = {id(module) for module in shared.values()}
        # by their identity: one that has two owners is copied once
        self._copies: dict[int, Any] = {}
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        # modules and what they compute with; their attributes that are others, once weights were loaded
        self._parts: list[tuple[Any, Any]] = []
        self._changed: list[list[str]] = []
        self._model = self._module(model)

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, torch.Tensor]], config: Any) -> None:
        """Have vLLM load these into it, as into a model that runs.

        Args:
            config: vLLM's `ModelConfig` of the model.
        """
        initialize_layerwise_reload(self._model)
        before = [dict(vars(copy)) for _, copy in self._parts]
        self._model.load_weights(weights)
        finalize_layerwise_reload(self._model, config)
        pack_tied_head(self._model)
        for (_, copy), was in zip(self._parts, before, strict=True):
            now = vars(copy)
            names = (name for name in now.keys() | was.keys() if now.get(name, _NOTHING) is not was.get(name, _NOTHING))
            self._changed.append(sorted(names))

    @torch.no_grad()
    def exchange(self) -> None:
        """The model has these tensors from now on, and the twin those that the model had. Called between two steps."""
        for own, other in self._tensors:
            if own.device.type == "cpu":
                own.data, other.data = other.data, own.data
            else:
                # graphs have its address; on the stream that the steps are on
                before = own.clone()
                own.copy_(other)
                other.copy_(before)
                other.record_stream(torch.cuda.current_stream())
        for (part, copy), names in zip(self._parts, self._changed, strict=True):
            for name in names:
                mine, theirs = (vars(one).pop(name, _NOTHING) for one in (part, copy))
                vars(part).update({} if theirs is _NOTHING else {name: theirs})
                vars(copy).update({} if mine is _NOTHING else {name: mine})

    def _module(self, module: torch.nn.Module) -> torch.nn.Module:
        if (known := self._copies.get(id(module))) is not None:
            return known
        copy = self._copies[id(module)] = self._part(module)
        own = vars(copy)
        for kind in ("_parameters", "_buffers"):
            own[kind] = {name: one if one is None else self._tensor(one) for name, one in own[kind].items()}
        own["_non_persistent_buffers_set"] = set(own["_non_persistent_buffers_set"])
        # a loader of weights may leave something in them
        for name in ("quant_method", "impl"):
            if hasattr(own.get(name), "__dict__"):
                own[name] = self._part(own[name])
        info, there = get_layerwise_info(copy), get_layerwise_info(module)
        # vLLM leaves its loaders in them
        params, buffers = ({name: to_meta_tensor(one) for name, one in kind.items()} for kind in there.restore_metadata)
        info.restore_metadata, info.restore_device = (params, buffers), there.restore_device
        children = own["_modules"].items()
        own["_modules"] = {
            name: one if one is None else self._module(one) for name, one in children if id(one) not in self._shared
        }
        return copy

    def _part(self, part: Any) -> Any:
        copy = object.__new__(type(part))
        vars(copy).update(vars(part))
        self._parts.append((part, copy))
        return copy

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if (known := self._copies.get(id(tensor))) is not None:
            return known
        copy = self._copies[id(tensor)] = tensor.data.clone()
        # with what loads its weights
        copy.__class__, copy.__dict__ = tensor.__class__, dict(tensor.__dict__)
        self._tensors.append((tensor, copy))
        return copy


class HeadLoad:
    """Weights on their way from a place into a twin, on a thread of its own.

    Args:
        runner: our V1 or V2 runner.
        is_new: False: the drafter had these before; whether they can draft is not asked again.
    """

    def __init__(self, runner: Any, place: Place, *, is_new: bool = True) -> None:
        self.drafter, self.place = runner.model_drafter, place
        if self.drafter is None:
            hint = "start it with a `speculative_config`; a failed one stays off"
            raise ConfigError("no model drafts in this engine", hint)
        self._target, self._is_new, self._device = runner.get_model(), is_new, runner.device
        self.num_tensors = 0
        self.error: SpecRolloutError | None = None
        self.twin: Twin | None = None
        """There once it is done, if nothing was wrong."""
        self.thread = threading.Thread(target=self._run_aside, name="specrollout-swap", daemon=True)

    def _run_aside(self) -> None:
        with _aside(self._device):
            self.run()

    def run(self) -> None:
        try:
            with _configured(self.drafter.of_vllm.vllm_config):
                self.twin = self._made()
        except SpecRolloutError as error:
            self.error = error
        except CONTAINED as error:
            cause = f"`{self.place[0]}` could not be loaded: {type(error).__name__}: {error}"
            self.error = ConfigError(cause, "the drafter goes on with its own weights; the engine's log says more")
            logger.warning("Spec rollout: %s", cause, exc_info=True)

    def _made(self) -> Twin:
        proposer, (path, below) = self.drafter.of_vllm, self.place
        shared = _shared_modules(proposer.model, self._target)
        weights = _read(path_of(proposer), path, below, shared, self._is_new)
        if self._is_new:
            _check_drafts(weights, path, proposer.vllm_config.model_config.get_vocab_size())
        self.num_tensors = len(weights)
        twin = Twin(proposer.model, shared)
        # each leaves memory once it is in its layer
        each = ((name, weights.pop(name)) for name in list(weights))
        twin.load(each, proposer.vllm_config.speculative_config.draft_model_config)
        return twin


class Swapper:
    """Which weights the drafter of a runner has, which are on their way, and which may come back.

    On several ranks each has one. Calls come between two steps, in one order on all of them.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        # where the weights that serve came from; None: as the engine was started
        self._place: Place | None = None
        self._load: tuple[str, HeadLoad] | None = None
        # what serves again if the head on probation is worse, and whence
        self._before: tuple[Twin, Place | None] | None = None

    def begin(self, name: str, path: Path, below: Path | None = None) -> None:
        """Make weights ready: a folder with config.json and safetensors, or one such file.

        Args:
            name: by which it is asked for; whatever was being made ready before is dropped.
            below: as in `Place`; a `path` that is not absolute lies in it.

        Raises:
            ConfigError: no model drafts.
        """
        self._load = None
        load = HeadLoad(self._runner, (path, below))
        self._load = name, load
        load.thread.start()

    def is_ready(self, name: str) -> bool:
        """Raises:
        ConfigError, UnsupportedError: the weights cannot be used; the drafter goes on with its own.
        ForbiddenError: they lie outside of `below`; likewise.
        """
        load = self._named(name)
        if load.thread.is_alive():
            return False
        if load.error is not None:
            raise load.error
        return True

    def end(self, name: str, *, is_taken: bool) -> dict[str, int]:
        """What was made ready serves from now on, or is dropped.

        Returns:
            "tensors": how many were read, and "version": the number of the head that serves.

        Raises:
            as `is_ready`.
        """
        load, drafter = self._named(name), self._runner.model_drafter
        if is_taken:
            self.is_ready(name)
        self._load = None
        if not is_taken:
            return {}
        if load.drafter is not drafter or load.twin is None:
            raise ConfigError("no model drafts in this engine any more", "see its log, and start it anew")
        self._exchange(load.twin)
        # where each rank has a scheduler of its own, none could tell the others that it goes back
        is_judged = not self._runner.drafting.is_apart
        drafter.heads.load(is_judged=is_judged)
        self._before = (load.twin, self._place) if is_judged else None
        self._place = load.place
        self._renew()
        return {"tensors": load.num_tensors, "version": drafter.heads.number}

    def again(self) -> None:
        """The weights were lost while the engine slept: they come from where they came from.

        Raises:
            as `is_ready`.
        """
        own = self._runner.model_drafter
        load = HeadLoad(self._runner, self._place or (path_of(own.of_vllm), None), is_new=False)
        load.run()
        if load.twin is None:
            raise load.error or ConfigError("the drafter's weights are lost", "start the engine anew")
        self._exchange(load.twin)

    @property
    def verdict(self) -> tuple[int, bool] | None:
        """What the scheduler is to tell all ranks, as `Heads.verdict`."""
        drafter = self._runner.model_drafter
        return None if drafter is None else drafter.heads.verdict

    def begin_step(self, judged: tuple[int, bool] | None) -> None:
        """A step begins.

        Args:
            judged: as `judged_of`.
        """
        drafter = self._runner.model_drafter
        if judged is None or drafter is None or self._before is None or drafter.heads.number != judged[0]:
            return  # others may have been loaded meanwhile
        (twin, place), self._before, told = self._before, None, drafter.heads.as_dict()
        drafter.heads.judged(stays=judged[1])
        if judged[1]:
            return
        try:
            self._exchange(twin)
        except ConfigError:
            return  # it is off, and somebody was told
        self._place = place
        self._renew()
        if told["match_rate"] is not None:  # by the rank that judged
            logger.warning(
                "Spec rollout: head %d is worse than head %d, and goes: its first choices were met %.3f of the time,"
                " and before %.3f",
                *(told["number"], told["parent"], told["match_rate"], told["match_rate_before"]),
            )  # fmt: skip

    def rest(self) -> None:
        """The engine sleeps: nothing but the weights that serve takes memory."""
        self._load = self._before = None
        if self._runner.model_drafter is not None:
            self._runner.model_drafter.heads.judged(stays=True)

    def _named(self, name: str) -> HeadLoad:
        if self._load is None or self._load[0] != name:
            raise ConfigError(
                "these weights were dropped: others were loaded meanwhile, or the engine slept", "load them once more"
            )
        return self._load[1]

    def _exchange(self, twin: Twin) -> None:
        runner = self._runner
        try:
            twin.exchange()
        except CONTAINED as error:
            # half old and half new is worse than none
            drafter, runner.model_drafter, self._before = runner.model_drafter, None, None
            runner.spec_rollout.drop(drafter, error)
            cause = f"weights could not be exchanged: {error}"
            raise ConfigError(cause, "the drafter is off; start the engine anew") from error

    def _renew(self) -> None:
        """What is known of the weights before holds for those that serve, but for little."""
        runner, drafter = self._runner, self._runner.model_drafter
        drafter.renew()
        runner.spec_rollout.renewed(drafter)
        runner.spec_rollout.worth.renew(drafter.name)
        runner.spec_rollout.budget.renewed(drafter.source, drafter.num_sources)
        runner.metrics.head(drafter.heads.number, drafter.heads.went_back)


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """This thread takes what steps leave: at low priority, one core of any, and a stream of its own."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        os.sched_setaffinity(0, cores_of_process())  # vLLM binds the thread that began this one to its own
    # of this thread, and of those that begin meanwhile
    count = torch.get_num_threads()
    torch._C.set_num_threads(1)
    try:
        with contextlib.ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                stream = torch.cuda.Stream()
                stack.callback(stream.synchronize)
                stack.enter_context(torch.cuda.stream(stream))
            yield
    finally:
        torch._C.set_num_threads(count)


@contextlib.contextmanager
def _configured(config: Any) -> Iterator[None]:
    """vLLM's current configuration is this, unless one is set. It is one for all threads: what the engine's own sets
    meanwhile stays."""
    is_ours = vllm_configs._current_vllm_config is None
    if is_ours:
        vllm_configs._current_vllm_config = config
    try:
        yield
    finally:
        if is_ours and vllm_configs._current_vllm_config is config:
            vllm_configs._current_vllm_config = None


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
