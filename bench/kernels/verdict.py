"""Judging drafts (`tree_verify`) and moving accepted keys and values (`kv_commit`), compared with specifications."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import torch
from vllm_specrollout.kernels.kv_commit.naive import kv_commit as naive_commit
from vllm_specrollout.kernels.tree_verify.naive import sample_rows, walk

from .inputs import make_commit, make_verdict
from .shapes import MODELS, Verdict

_CHECKED_VOCAB = 1000


def load_verify() -> Any:
    """Our kernel; only here, as all of them."""
    return importlib.import_module("vllm_specrollout.kernels.tree_verify.kernel").tree_verify


def load_commit() -> Any:
    """The module, for a commit needs a table of the caches."""
    return importlib.import_module("vllm_specrollout.kernels.kv_commit.kernel")


def checked_verify(batch: int, nodes: int, device: str, kernel: Any = None) -> dict[str, Any]:
    """Whether ours, or another in its place, judges small trees as its specification does."""
    arguments = make_verdict(Verdict(MODELS["0.5B"], batch, nodes), device, vocab=_CHECKED_VOCAB)
    kernel, wrong = kernel or load_verify(), ""
    for temperature in (0.0, 1.0):
        arguments["temperature"].fill_(temperature)
        wanted = _specified(arguments)
        verdict = kernel(**arguments, width=1 + nodes)
        counts = verdict.num_sampled.tolist()
        found = [tokens[:n] for tokens, n in zip(verdict.token_ids.tolist(), counts, strict=True)]
        if found != wanted:
            wrong = wrong or f"temperature {temperature}, {nodes} nodes: tokens {found}, should be {wanted}"
    return _told(wrong, "tokens of greedy and of random walks")


def _specified(arguments: dict[str, torch.Tensor]) -> list[list[int]]:
    """Tokens of each request, as they should be."""
    names = ("request_index", "temperature", "seeds", "pos")
    sampled = sample_rows(arguments["logits"], *(arguments[name].tolist() for name in names))
    drafts, parents = arguments["draft_ids"].tolist(), arguments["parents"].tolist()
    bounds = itertools.pairwise(arguments["cu_rows"].tolist())
    return [list(walk(sampled[i:j], drafts[i:j], parents[i:j])[0]) for i, j in bounds]


def checked_commit(batch: int, nodes: int, device: str, module: Any = None) -> dict[str, Any]:
    """Whether ours, or another in its place, moves what its specification moves."""
    module = module or load_commit()
    layers, arguments = make_commit(Verdict(MODELS["0.5B"], batch, nodes), device)
    wanted = [layer.clone() for layer in layers]
    naive_commit(wanted, *arguments.values())
    module.kv_commit(module.CacheTable.of(layers), *arguments.values())
    # what stands behind the accepted slots is overwritten before it is read, but nothing may write there either
    is_right = all(torch.equal(found, layer) for found, layer in zip(layers, wanted, strict=True))
    return _told("" if is_right else f"batch {batch}, {nodes} nodes: the caches differ", "every byte of every layer")


def _told(wrong: str, what: str) -> dict[str, Any]:
    return {"passed": not wrong, "checked": wrong[:500] or f"{what} against the specification's"}
