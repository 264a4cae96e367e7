"""Judging drafts (`tree_verify`) and moving accepted keys and values (`kv_commit`): compared and timed."""

from __future__ import annotations

import functools
import importlib
from dataclasses import asdict
from typing import Any

import torch

from . import reference
from .inputs import make_commit, make_verdict
from .shapes import MODELS, Verdict
from .timing import Timer

_CHECKED_VOCAB = 1000
_SMALLER = {"passed": None, "checked": "at smaller shapes, by `--check`"}


def load_verify() -> Any:
    """Our kernel; only here, as all of them."""
    return importlib.import_module("vllm_specrollout.kernels.tree_verify.kernel").tree_verify


def load_commit() -> Any:
    """The module, for a commit needs a table of the caches."""
    return importlib.import_module("vllm_specrollout.kernels.kv_commit.kernel")


def checked_verify(batch: int, nodes: int, device: str) -> dict[str, Any]:
    """Whether ours judges small trees as its specification does."""
    return _told(check_verify(load_verify(), batch, nodes, device), "tokens of greedy and of random walks")


def checked_commit(batch: int, nodes: int, device: str) -> dict[str, Any]:
    """Whether ours moves what its specification moves."""
    return _told(check_commit(load_commit(), batch, nodes, device), "every byte of every layer")


def _told(wrong: str | None, what: str) -> dict[str, Any]:
    return {"passed": wrong is None, "checked": wrong[:500] if wrong else f"{what} against the specification's"}


def check_verify(kernel: Any, batch: int, nodes: int, device: str) -> str | None:
    """Walks over small trees, greedy ones to the bottom and random ones; the reason if one is wrong."""
    arguments = make_verdict(Verdict(MODELS["0.5B"], batch, nodes), device, vocab=_CHECKED_VOCAB)
    for temperature in (0.0, 1.0):
        arguments["temperature"].fill_(temperature)
        wanted = reference.verdict(arguments)
        verdict = kernel(**arguments, width=1 + nodes)
        counts = verdict.num_sampled.tolist()
        found = [tokens[:n] for tokens, n in zip(verdict.token_ids.tolist(), counts, strict=True)]
        if found != wanted:
            return f"temperature {temperature}, {nodes} nodes: tokens {found}, should be {wanted}"
    return None


def check_commit(module: Any, batch: int, nodes: int, device: str) -> str | None:
    """Every byte of every layer; the reason if one is wrong."""
    layers, arguments = make_commit(Verdict(MODELS["0.5B"], batch, nodes), device)
    wanted = reference.committed(layers, arguments)
    module.kv_commit(module.CacheTable.of(layers), *arguments.values())
    # what stands behind the accepted slots is overwritten before it is read, but nothing may write there either
    if not all(torch.equal(found, layer) for found, layer in zip(layers, wanted, strict=True)):
        return f"batch {batch}, {nodes} nodes: the caches differ"
    return None


def measure_verify(timer: Timer, case: Verdict, device: str) -> dict[str, Any]:
    """Time of judging one step. On a CPU over a small vocabulary: the interpreter would take minutes."""
    arguments = make_verdict(case, device, vocab=None if device == "cuda" else _CHECKED_VOCAB)
    # greedy sampling would skip the noise
    arguments["temperature"].fill_(1.0)
    time = timer.time([functools.partial(load_verify(), **arguments, width=1 + case.nodes)])
    return {**_SMALLER, "times": {"ours": asdict(time)}, **timer.roof(case.logits_bytes)}


def measure_commit(timer: Timer, case: Verdict, device: str) -> dict[str, Any]:
    """Time of moving half of a step's nodes, in all layers."""
    module = load_commit()
    layers, moves = make_commit(case, device)
    table = module.CacheTable.of(layers)
    time = timer.time([functools.partial(module.kv_commit, table, *moves.values())])
    return {**_SMALLER, "times": {"ours": asdict(time)}, **timer.roof(case.commit_bytes)}
