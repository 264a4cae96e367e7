"""Judging drafts (`tree_verify`) and moving accepted keys and values (`kv_commit`), against the copy bandwidth."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .inputs import make_commit, make_verdict
from .shapes import MODELS, Verdict, verdicts
from .timing import Time, Timer


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One shape of both kernels. A time is None where the kernel is not there or wrong; `notes` says which."""

    model: str
    batch: int
    nodes: int
    verify: Time | None
    verify_roof_us: float
    commit: Time | None
    commit_roof_us: float
    notes: tuple[str, ...] = ()


def load() -> tuple[Any, Any, list[str]]:
    """(tree_verify or None, the kv_commit module or None, why not)."""
    found: list[Any] = []
    notes = []
    for name, attribute in (("tree_verify", "tree_verify"), ("kv_commit", "kv_commit")):
        try:
            module = importlib.import_module(f"vllm_specrollout.kernels.{name}.kernel")
            getattr(module, attribute)
            found.append(module)
        except (ImportError, AttributeError) as error:
            found.append(None)
            notes.append(f"{name} cannot be imported: {error}")
    return (None if found[0] is None else found[0].tree_verify), found[1], notes


def check_verify(kernel: Any, device: str = "cuda") -> str | None:
    """Walks over small trees, greedy ones to the bottom and random ones; the reason if one is wrong."""
    from . import reference  # it needs the kernels' folders, which may be missing

    for batch, nodes in ((1, 0), (3, 7), (2, 31)):
        arguments = make_verdict(Verdict(MODELS[1], batch, nodes), device, vocab=1000)
        for temperature in (0.0, 1.0):
            arguments["temperature"].fill_(temperature)
            wanted = reference.verdict(arguments)
            verdict = kernel(**arguments, width=1 + nodes)
            counts = verdict.num_sampled.tolist()
            found = [tokens[:n] for tokens, n in zip(verdict.token_ids.tolist(), counts, strict=True)]
            if found != wanted:
                return f"temperature {temperature}, {nodes} nodes: tokens {found}, should be {wanted}"
    return None


def check_commit(module: Any, device: str = "cuda") -> str | None:
    """Every byte of every layer; the reason if one is wrong."""
    from . import reference

    for batch, nodes in ((1, 7), (3, 31)):
        layers, arguments = make_commit(Verdict(MODELS[1], batch, nodes), device)
        wanted = reference.committed(layers, arguments)
        module.kv_commit(module.CacheTable.of(layers), *arguments.values())
        # what stands behind the accepted slots is overwritten before it is read, but nothing may write there either
        if not all(torch.equal(found, layer) for found, layer in zip(layers, wanted, strict=True)):
            return f"batch {batch}, {nodes} nodes: the caches differ"
    return None


def measure(
    timer: Timer, bandwidth: float, is_quick: bool, report: Callable[[str], None], device: str = "cuda"
) -> Iterator[Row]:
    """A row per shape; a kernel that fails its check is not timed."""
    verify, commit, notes = load()
    if verify is not None and (wrong := check_verify(verify, device)) is not None:
        verify = None
        notes.append(f"tree_verify is wrong, so it is not timed: {wrong}")
    if commit is not None and (wrong := check_commit(commit, device)) is not None:
        commit = None
        notes.append(f"kv_commit is wrong, so it is not timed: {wrong}")
    for case in verdicts(is_quick):
        report(f"{case.model.name} batch {case.batch} nodes {case.nodes}: verify and commit")
        verify_time = commit_time = None
        if verify is not None:
            arguments = make_verdict(case, device)
            # greedy sampling would skip the noise
            arguments["temperature"].fill_(1.0)
            verify_time = timer.time(functools.partial(verify, **arguments, width=1 + case.nodes))
        if commit is not None:
            layers, moves = make_commit(case, device)
            table = commit.CacheTable.of(layers)
            commit_time = timer.time(functools.partial(commit.kv_commit, table, *moves.values()))
        yield Row(
            model=case.model.name,
            batch=case.batch,
            nodes=case.nodes,
            verify=verify_time,
            verify_roof_us=case.logits_bytes / bandwidth * 1e6,
            commit=commit_time,
            commit_roof_us=case.commit_bytes / bandwidth * 1e6,
            notes=tuple(notes),
        )
