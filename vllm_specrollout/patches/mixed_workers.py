"""A worker class of the user's, with ours mixed in.

vLLM is told the name of a worker class, and looks it up in every process. The names here hold both classes' own names,
so each process makes the same class for itself: `vllm_specrollout.patches.mixed_workers.OURS|THEIRS`, with `:` for
their dots.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from vllm_specrollout.errors import UnsupportedError

_MAKES_RUNNER = "_make_model_runner"


def name_of(ours: str, theirs: str) -> str:
    """The name of our worker class on top of another one.

    Args:
        ours, theirs: qualified names.

    Raises:
        UnsupportedError: that cannot be.
    """
    name = f"{ours}|{theirs}".replace(".", ":")
    __getattr__(name)
    return f"{__name__}.{name}"


@functools.cache
def __getattr__(name: str) -> type:
    ours, is_one_of_these, theirs = name.replace(":", ".").partition("|")
    if not is_one_of_these:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return mixed(_found(ours), _found(theirs), theirs)


def mixed(ours: type, theirs: Any, shown: str) -> type:
    """`ours`, and behind it `theirs` in the place of vLLM's own worker.

    Raises:
        UnsupportedError: they do not go together.
    """
    stock = next(cls for cls in ours.__mro__ if cls.__module__.startswith("vllm."))
    if not (isinstance(theirs, type) and issubclass(theirs, stock)):
        raise _refused(shown, f"is no subclass of vLLM's `{stock.__module__}.{stock.__name__}`, which runs here")
    if any(_MAKES_RUNNER in vars(cls) for cls in theirs.__mro__[: theirs.__mro__.index(stock)]):
        raise _refused(shown, "makes a model runner of its own, and so does spec rollout")
    try:
        return type(f"SpecRollout{theirs.__name__}", (ours, theirs), {"__module__": __name__})
    except TypeError as error:
        raise _refused(shown, f"cannot be mixed with spec rollout's: {error}") from None


def check_runner(worker: Any, *runners: type) -> None:
    """Called when a worker has made its runner.

    Args:
        runners: those that it may be; what is behind a subclass of theirs is not known.

    Raises:
        UnsupportedError: it is another one.
    """
    if type(worker.model_runner) not in runners:
        raise _refused(type(worker).__name__, f"made a `{type(worker.model_runner).__name__}` as its model runner")


def _found(qualified: str) -> Any:
    module, _, name = qualified.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _refused(qualified, f"cannot be imported: {error}") from None


def _refused(shown: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"`--worker-cls` is `{shown}`, which {why}",
        "give a subclass of vLLM's own worker that leaves its runner alone, put what it adds into a class for"
        " `--worker-extension-cls`, or leave spec rollout off",
    )
