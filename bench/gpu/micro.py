"""`specrollout bench micro`: the parts of a step by themselves, each beside what was predicted; and a drafter's passes.

A prediction comes first, so that a figure can surprise. They hold for a 7B (Qwen2.5's shape) in bfloat16 on an H200.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_specrollout.cluster.child import Command
from vllm_specrollout.cluster.line import Ask
from vllm_specrollout.cluster.messages import Sampling

from ..kernels.shapes import MODELS, Attention, Verdict
from ..runner.fields import Row, columns
from ..runner.interpreter import ENVIRONMENT as INTERPRETED
from ..runner.models import bare_model
from ..runner.report import Found, Table
from ..runner.rows import quartiles
from ..runner.scenario import Scenario, Session, command, flag

PARTS = ("rows", "products", "attention", "verify", "lookup", "drafter")
READ, FLOPS, SHARE, LAUNCH_S = 4.27e12, 790e12, 0.8, 2.5e-6
"""Bytes and products a second of the device, the share of these that some hundred rows reach, and a launch."""
VERIFY_ROW_US = 0.61
_ROWS = (1, 8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256, 272, 320, 384, 512)
_ATTENTION = {
    **{(1, 1024, 7): (12.2, 10.6, 15.1), (1, 1024, 15): (14.1, 12.5, 17.0), (8, 4096, 7): (None, None, None)},
    **{(32, 1024, 7): (29.2, 27.7, 32.2), (32, 1024, 15): (33.5, 30.4, 34.9)},
    **{(32, 16384, 7): (254.0, 253.0, 257.5), (32, 16384, 15): (263.0, 267.0, 271.5)},
}
"""Batch, context and nodes -> predicted microseconds of a layer: causal, over the context alone, and nodes with it."""
_PROMPT, _WARM_UP = 256, 6  # tokens, and passes that are not timed
_COPIES, _LAYERS = 3, 4  # of weights, and of keys and values, so that none comes from the cache


@dataclass(frozen=True, kw_only=True)
class Micro(Scenario):
    """Time one part of a step, or a drafter's passes, beside what was predicted of it."""

    bench: ClassVar[str] = "micro"

    part: str = flag("rows", "Which part: " + ", ".join(PARTS) + ".", choices=PARTS)
    device: str = flag(
        "cuda", "`cpu` walks through it on tiny shapes: no figure means anything.", choices=("cuda", "cpu")
    )

    def measure(self, session: Session) -> Found:
        if self.device == "cpu":
            # before Triton is imported
            os.environ["TRITON_INTERPRET"] = INTERPRETED["TRITON_INTERPRET"]
        from ..kernels.timing import GraphTimer, HostTimer

        report, rows = session.display.steps(1), []
        for row in _MAKERS[self.part](GraphTimer() if self.device == "cuda" else HostTimer()):
            report(row.name, 0)
            rows.append(row)
        return Found(rows=rows)

    def title(self, found: Found) -> str:
        return f"{self.part}{'' if self.device == 'cuda' else ', A DRY WALK, no figure means anything'}"

    def told(self, found: Found) -> Iterator[Table]:
        yield Table(found.rows, columns("name", "unit", "measured", "predicted"))


def _rows(timer: Any) -> Iterator[Row]:
    """From how many rows on a chain's bits are no longer those of plain decoding, with one split, as where vLLM's
    kernels are batch-invariant.

    FlashAttention 3 walks heads of 64 in tiles of 192 keys up to 64 packed rows, and of 128 beyond; it goes by the rows
    that the graph was captured for.
    """
    import torch

    most = 32 if timer.device == "cuda" else 3
    for size, group in itertools.product((64, 128), (4, 7, 8)):
        attend, name = _attending(timer.device, size, group, most), f"heads of {size}, {group} to a key head"
        alone = torch.cat([attend(i, 1) for i in range(most)])
        predicted = float(64 // group + 1) if size == 64 else 0.0
        for what, counts, rows in (
            ("rows from which on they differ", range(2, most + 1), lambda n: n),
            ("bucket from which on two rows do", range(2, most + 1), lambda n: 2),
        ):
            differ = [n for n in counts if not torch.equal(attend(0, rows(n), n), alone[: rows(n)])]
            yield Row(
                name=f"{name}: {what} (0: never)",
                unit="rows",
                measured=float(min(differ, default=0)),
                predicted=predicted,
            )


def _attending(device: str, size: int, group: int, most: int) -> Callable[..., Any]:
    """(first row, rows, rows that the graph was captured for) -> what they attend to, of one request's chain."""
    import torch

    from ..kernels import flash

    torch.manual_seed(size + group)
    kv_heads, block, context = 2, 16, 1605 if device == "cuda" else 37
    blocks = -(-(context + most) // block)
    cache = torch.randn(blocks, kv_heads, block, 2 * size, dtype=torch.bfloat16, device=device)
    keys, values = cache.transpose(1, 2).split(size, dim=-1)
    table = torch.randperm(blocks, device=device).to(torch.int32)[None]
    query = torch.randn(most, group * kv_heads, size, dtype=torch.bfloat16, device=device)
    shared = {"k": keys, "v": values, "block_table": table, "softmax_scale": size**-0.5, "causal": True}

    def attend(first: int, count: int, captured: int = 0) -> torch.Tensor:
        found: torch.Tensor = flash.attend(device)(
            q=query[first : first + count],
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
            max_seqlen_q=captured or count,
            seqused_k=torch.tensor([context + first + count], dtype=torch.int32, device=device),
            max_seqlen_k=context + most,
            fa_version=3,
            num_splits=1,
            **shared,
        )
        return found

    return attend


def predicted_products_ms(rows: int, sizes: list[tuple[int, int]], layers: int, head: tuple[int, int]) -> float:
    """Of each matrix the larger of reading it and of computing rows in tiles of 64."""
    tiled = -(-rows // 64) * 64

    def one(n: int, k: int) -> float:
        return max(2.0 * n * k / READ, 2.0 * tiled * n * k / (FLOPS * SHARE)) + LAUNCH_S

    return 1e3 * (layers * sum(one(*size) for size in sizes) + one(*head))


def _products(timer: Any) -> Iterator[Row]:
    """A step's matrix products by its rows: where they rise is where further rows begin to cost."""
    import torch

    model, counts = (MODELS["7B"], _ROWS) if timer.device == "cuda" else (MODELS["0.5B"], _ROWS[:2])
    hidden, copies = model.heads * model.head_size, _COPIES if timer.device == "cuda" else 1
    sizes = [(hidden + 2 * model.kv_heads * model.head_size, hidden), (hidden, hidden)]
    sizes += [(2 * model.intermediate, hidden), (hidden, model.intermediate)]
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": timer.device}
    weights = [torch.randn(*size, **made) for _ in range(copies) for size in sizes]
    head = torch.randn(model.vocab, hidden, **made)
    for count in counts:
        inputs = {
            width: torch.randn(count, width, **made) for width in {weight.shape[1] for weight in (*weights, head)}
        }
        calls = [functools.partial(torch.nn.functional.linear, inputs[one.shape[1]], one) for one in (*weights, head)]
        us = model.layers * len(sizes) * timer.time(calls[:-1]).median_us + timer.time(calls[-1:]).median_us
        predicted = predicted_products_ms(count, sizes, model.layers, (model.vocab, hidden))
        yield Row(name=f"products of {count} rows", unit="ms", measured=us / 1e3, predicted=predicted)


def _attention(timer: Any) -> Iterator[Row]:
    """A layer's attention: causal, as plain decoding and chains have it; over the context; and with a tree's nodes."""
    from ..kernels import attention, flash
    from ..kernels.inputs import make_attention

    model, cells = (MODELS["7B"], _ATTENTION) if timer.device == "cuda" else (MODELS["0.5B"], {(2, 64, 7): (None,) * 3})
    both = functools.partial(attention.ours, kernel=attention.load())
    ways = {"causal": flash.causal, "over the context": flash.context, "context and nodes": both}
    for (batch, context, nodes), predicted in cells.items():
        inputs = [make_attention(Attention(model, context, batch, nodes, "tree"), timer.device) for _ in range(_LAYERS)]
        for (way, make), expected in zip(ways.items(), predicted, strict=True):
            yield _timed(timer, [make(one) for one in inputs], f"{batch} x {context}, {nodes} nodes: {way}", expected)


def _verify(timer: Any) -> Iterator[Row]:
    """Judging a step's rows with noise, of logits as a step has them."""
    import torch

    from ..kernels.inputs import make_verdict
    from ..kernels.verdict import load_verify

    verify, is_small = load_verify(), timer.device == "cpu"
    for batch, nodes in ((1, 3),) if is_small else ((8, 7), (32, 7), (32, 15)):
        case = Verdict(MODELS["7B"], batch, nodes)
        arguments = make_verdict(case, timer.device, vocab=1000 if is_small else None, dtype=torch.bfloat16)
        arguments["temperature"].fill_(1.0)
        call = functools.partial(verify, **arguments, width=1 + nodes)
        yield _timed(timer, [call], f"verify {case.rows} rows", VERIFY_ROW_US * case.rows)


def _lookup(timer: Any) -> Iterator[Row]:
    """Looking drafts up in sixteen earlier answers and fifteen siblings of each request."""
    import torch

    lookup = importlib.import_module("vllm_specrollout.kernels.lookup.kernel")
    is_small = timer.device == "cpu"
    length, past, group, most = (64, 2, 2, 7) if is_small else (2048, 16, 16, 15)
    for requests in (2,) if is_small else (16, 64, 256):
        made = functools.partial(torch.randint, dtype=torch.int32, device=timer.device)
        problems = -(-requests // group)
        starts = torch.arange(problems * past, dtype=torch.int32, device=timer.device) * length
        spans = torch.stack([starts, starts + length, torch.zeros_like(starts)], dim=1).view(problems, past, 3)
        row = torch.arange(requests, dtype=torch.int32, device=timer.device)
        mates = (row[:, None] // group) * group + torch.arange(group, dtype=torch.int32, device=timer.device)
        siblings = mates[mates != row[:, None]].view(requests, group - 1)
        batch = torch.cat([row[:, None], row[:, None] // group, siblings], dim=1)
        filled = functools.partial(torch.full, (requests,), dtype=torch.int32, device=timer.device)
        tiles = (past + group) * -(-length // lookup.TILE)
        find = lookup.Lookup(most, requests, tiles * requests, torch.device(timer.device), max_depth=most)
        call = functools.partial(
            find, made(0, 400, (problems * past * length,)), spans, made(0, 400, (requests, length)), filled(16),
            filled(length // 2), batch.contiguous(), filled(most), filled(0), filled(-1)[:, None].contiguous(), tiles,
        )  # fmt: skip
        yield _timed(timer, [call], f"look up for {requests} requests", 20.0 if requests == 64 else None)


def _drafter(timer: Any) -> Iterator[Row]:
    """An engine that drafts, alone with its share of a GPU: whether one that is lent can pay."""
    is_small = timer.device == "cpu"
    environment = Command.of("", [f"{timer.device}:0"], {}).environment
    os.environ.clear()
    os.environ.update(environment)
    from vllm_specrollout.worker.drafter_engine import DrafterEngine
    from vllm_specrollout.worker.models.decoupled import SHARE

    own = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28} if is_small else SHARE
    with tempfile.TemporaryDirectory() as folder:
        model = str(bare_model("tiny" if is_small else "0.5B", Path(folder)))
        args = {"load_format": "dummy", "max_model_len": 1024, "max_num_seqs": 64, **own}
        engine = DrafterEngine(model, args, takes_up=is_small)
        for batch in (2,) if is_small else (1, 4, 8, 16, 32):
            yield from passes(engine, batch, 6 if is_small else 54)
        for name, rest in (("sleep", engine.sleep), ("wake", engine.wake)) * 2:
            begin = time.perf_counter()
            rest()
            yield Row(name=name, unit="ms", measured=(time.perf_counter() - begin) * 1e3)
        engine.shutdown()


def passes(engine: Any, batch: int, count: int) -> Iterator[Row]:
    """Passes of so many requests, with none, one and all of them asked anew in turns."""
    running: list[str] = []
    found: dict[str, list[float]] = {"none": [], "one": [], "all": []}
    for number in range(count + _WARM_UP):
        kind = tuple(found)[number % 3]
        stale = running[: {"none": 0, "one": 1, "all": batch}[kind]]
        begin = time.perf_counter()
        engine.abort(stale)
        running = running[len(stale) :]
        for place in range(len(running), batch):
            tokens = [5 + (place * 7 + i) % 200 for i in range(_PROMPT + number)]
            running.append(f"{number}/{place}")
            engine.add(Ask(running[-1], tokens, _PROMPT, 2 * (count + _WARM_UP), True), Sampling(1.0, seed=place))
        engine.step()
        if number >= _WARM_UP:
            found[kind].append((time.perf_counter() - begin) * 1e3)
    engine.abort(running)
    for kind, ms in found.items():
        name = f"a drafter's pass of {batch}, {kind} asked anew"
        yield Row(name=name, unit="ms", measured=statistics.median(ms), quartiles=quartiles(ms))


def _timed(timer: Any, calls: list[Callable[[], Any]], name: str, predicted: float | None) -> Row:
    """One of these calls."""
    time = timer.time(calls)
    quartiles = (time.low_us, time.high_us)
    return Row(name=name, unit="us", measured=time.median_us, predicted=predicted, quartiles=quartiles)


_MAKERS: dict[str, Callable[[Any], Iterator[Row]]] = dict(
    zip(PARTS, (_rows, _products, _attention, _verify, _lookup, _drafter), strict=True)
)

bench_micro = command(Micro)
