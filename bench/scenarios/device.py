"""`specrollout bench device`: ours beside stock vLLM on one GPU: whose tokens, how fast, and what a step is made of.

A model is a config.json and nothing else: vLLM makes its weights up, and every engine refills them in place, so that
the model chooses its tokens. `--dry` walks through the same code on a CPU, with tiny shapes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median_high
from typing import Any, ClassVar

from vllm_specrollout.config import BUDGETS
from vllm_specrollout.errors import SpecRolloutError

from ..kernels.shapes import Cell
from ..runner.engines import IN_ONE_PROCESS, STOCK, Engines, run_round, sampling, write_answers
from ..runner.fields import Columns, Row, columns
from ..runner.interpreter import ENVIRONMENT as INTERPRETED
from ..runner.models import BARE, bare_model
from ..runner.oracle import ORACLE
from ..runner.report import Found, Table
from ..runner.rows import UNTOLD, Judged, Pair, Run, partings, proven_row
from ..runner.scenario import EngineScenario, Session, command, flag
from ..runner.ties import JUDGE, judge

OURS = ("chain", "tree", "ngram")
MOST_ASKED = 32
"""Differences of a row that stock is asked about; it is not asked about the others, so they are no proven ties."""
_LESSONS = 3  # runs after which our answers are taken to be what they are: a tie may turn each one's into others
_SLACK = 4  # a request may be given drafts beyond its last token
_TRACED_AT, _JOINING, _JOINING_LEN = 8, 4, 64  # a trace's first step; prompts that join there, and their least tokens
_PATTERN, _ALLOWED = 32, 12  # the ngram arm's prompts repeat so many tokens, its answers are made of so many


@dataclass(frozen=True, kw_only=True)
class Device(EngineScenario):
    """Compare ours with stock vLLM on one GPU, on a model of random weights: identity, speed, traces of steps."""

    bench: ClassVar[str] = "device"

    model: str = flag("0.5B", "Qwen2.5's shape of this size, or a tiny one.", choices=tuple(BARE))
    cells: tuple[Cell, ...] = flag(
        (Cell(1, 1024), Cell(8, 1024)),
        "BATCHxCONTEXT:NODES, the context cached beforehand; several numbers of draft nodes follow each other.",
        parse=Cell.parse_all,
    )
    arms: tuple[str, ...] = flag(
        OURS[:2],
        "Ours: chain, tree, ngram (beside the tree's oracle); stock again (strict: each alone).",
        choices=(*OURS, STOCK),
    )
    accuracy: float = flag(0.8, "Probability that an oracle's first choice is right.", within=(0, 1))
    tokens: int = flag(64, "Tokens generated per request.", within=(2, 1 << 14))
    logit_std: float = flag(1.0, "Of the logits: 1, the model chooses; 0.05, noise does, and ties are rare.")
    rounds: int = flag(0, "Timed rounds after a warm-up; 0: identity alone, once.", within=(0, 1000))
    traced: tuple[int, ...] = flag((0,), "Batches whose steps are traced; 0: none.", "--trace", within=(0, 1024))
    is_strict: bool = flag(False, "Batch-invariant kernels in both engines, and no tie is allowed.", "--strict")
    is_eager: bool = flag(False, "Without or with CUDA graphs, in both.", "--eager/--graphs")
    is_uncompiled: bool = flag(False, "Without torch's compiler: decoding in CUDA graphs alone.", "--uncompiled")
    budget: str = flag("fixed", "`fixed` drafts as told; `auto` drafts what pays.", choices=BUDGETS)
    is_dry: bool = flag(False, "On a CPU, each engine in one process; no figure means anything.", "--dry")
    is_interpreted: bool = flag(False, "Dry, on the V2 runner with its kernels interpreted.", "--interpreted")

    @property
    def most_nodes(self) -> int:
        return max(nodes for cell in self.cells for nodes in cell.nodes)

    @property
    def max_model_len(self) -> int:
        return max(cell.context for cell in self.cells) + Cell.BLOCK + self.tokens + self.most_nodes + _SLACK

    @property
    def jobs(self) -> list[tuple[Cell, str, int]]:
        """Cell, arm and draft nodes of each row; n-grams are looked up, and stock runs, once a cell."""
        return [
            (cell, arm, nodes)
            for cell in reversed(self.cells)
            for arm in self.arms
            for nodes in (cell.nodes if arm in OURS[:2] else (max(cell.nodes),))
        ]

    @property
    def kv_bytes(self) -> int:
        """KV cache that holds the largest cell to its end, with a block to spare per request."""
        room = self.tokens + self.most_nodes + 2 * Cell.BLOCK
        most = max(cell.batch * (cell.context + room) for cell in self.cells) + _JOINING * (_JOINING_LEN + room)
        model = BARE[self.model]
        return max(most, 2 * self.max_model_len) * model.layers * model.token_bytes

    @property
    def capture_sizes(self) -> list[int]:
        """Rows of a step that CUDA graphs are captured for: every batch, without drafts and with all of them."""
        exact = {cell.batch * (1 + n) for cell in self.cells for n in (0, *cell.nodes)}
        sizes, octave = {1, 2, 4}, 4
        while octave < max(exact):
            sizes |= {octave + octave * i // 4 for i in range(1, 5)}
            octave *= 2
        return sorted({size for size in sizes if size < max(exact)} | exact)

    def arguments(self) -> dict[str, Any]:
        """Of `vllm.LLM`, for every engine; what is captured is set, so that no engine chooses for itself."""
        sizes = self.capture_sizes
        compilation: dict[str, Any] = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": max(sizes)}
        if self.is_dry:
            # nothing is compiled on a CPU: it would take most of a dry walk's time
            compilation["mode"] = 0
        elif self.is_uncompiled:
            compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        return {
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": self.kv_bytes,
            "compilation_config": compilation,
            # several engines share the device; each one's KV cache is set, so this only has to be free
            "gpu_memory_utilization": 0.1,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
        }

    def spec_rollout(self, shape: str, oracle: Path) -> dict[str, Any]:
        """Our engine's configuration; requests choose their own number of drafts."""
        return {
            "drafters": [{"name": ORACLE, "path": str(oracle)}, *(["ngram"] if "ngram" in self.arms else [])],
            "budget": self.budget,
            "shape": shape,
            "max_draft_tokens": self.most_nodes,
            "max_depth": self.most_nodes,
        }

    def environment(self) -> dict[str, str]:
        # functions are sent to workers, to make weights and to look
        changed = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "PYTHONFAULTHANDLER": "1"}
        if self.is_strict and not self.is_dry:
            # the compiler would time variants that add up in other orders, and each engine choose its own
            changed |= {"VLLM_BATCH_INVARIANT": "1", "TORCHINDUCTOR_DETERMINISTIC": "1"}
        return {**changed, **(IN_ONE_PROCESS if self.is_dry else {}), **(INTERPRETED if self.is_interpreted else {})}

    def measure(self, session: Session) -> Found:
        folder, jobs = bare_model(self.model, session.scratch / "model"), self.jobs
        report = session.display.steps(4 + len(jobs))
        seqs = max(cell.batch for cell in self.cells) + _JOINING
        shape = {"seqs": seqs, "length": self.max_model_len, "width": 1, "is_eager": self.is_eager}
        with self.make_engines(folder, report, **shape, environment=self.environment()) as engines:
            bench = _Bench(self, engines, session.scratch)
            facts = bench.start()
            rows = [bench.row(*job) for job in jobs]
            wanted = [(cell, STOCK, 0) for cell in self.cells] + [job for job in jobs if job[1] in OURS]
            traced = [job for job in wanted if job[0].batch in self.traced]
            traces = [bench.trace(*job, joins) for job in traced for joins in (False, True)]
        return Found(model=f"random weights, {self.model}", rows=rows, extra={"engines": facts, "traces": traces})

    def title(self, found: Found) -> str:
        dry = "A DRY WALK, no figure means anything. " if self.is_dry else ""
        return f"{dry}{found.model}, {self.dtype}, logits of deviation {self.logit_std:g}"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield Table(found.extra["engines"], _ENGINES)
        yield Table(found.rows, _IDENTITY)
        if self.rounds:
            yield Table(found.rows, _SPEED)
        if found.extra["traces"]:
            yield Table(
                [{"name": one["name"], **step} for one in found.extra["traces"] for step in one["steps"]], _TRACE
            )
        yield from (f"{row.name}: {text}" for row in found.rows for text in row.differences)


_ENGINES: Columns = {
    "engine": "name",
    "runner": lambda one: one["runner"][0].rpartition(".")[2] + (" (V2)" if one["is_v2"] else " (V1)"),
    "attention": lambda one: "/".join([*one["attention"], *(f"FA{v}" for v in one["flash_attention"] if v != "None")]),
    "graphs": lambda one: one["cudagraph_mode"].rpartition(".")[2].partition(":")[0],
    "captured": lambda one: ", ".join(f"{kind} {count}" for kind, count in one["graphs"].items()) or None,
    "async": lambda one: "yes" if one["is_async"] else "no",
    "MiB": "device_mib",
}
_IDENTITY: Columns = {
    **columns("name: row", "passed", "identical", "compared: compared"),
    "ties": lambda row: len(row.ties),
    "unproven": lambda row: len(row.differences),
    **columns("drafted", "accepted", "branches", "steps_of_both"),
}
_SPEED = columns(
    *("name: row", "decode_speedup", "speedup: whole", "nodes_per_step", "step_ms: step ms", "stock_ms: stock ms"),
    "stale",
)
_TRACE: Columns = {
    "trace": "name",
    **{name: name for name in ("graph", "rows", "padded", "span_ms", "busy_ms", "gap_ms", "launches")},
}
"""Of one step each."""


class _Bench:
    """All rows, with engines that are started side by side."""

    def __init__(self, scenario: Device, engines: Engines, scratch: Path) -> None:
        self._scenario, self._engines, self._scratch = scenario, engines, scratch
        # engine -> what its prefix cache holds
        self._primed: dict[str, tuple[Cell, bool]] = {}

    def start(self) -> list[dict[str, Any]]:
        """What each engine is made of; all hold equal random weights then.

        Raises:
            SpecRolloutError: they do not, so nothing can be compared.
        """
        names, std = list(dict.fromkeys([STOCK, *map(_engine_of, self._scenario.arms)])), self._scenario.logit_std
        with ThreadPoolExecutor(max_workers=len(names)) as pool:
            list(pool.map(self._start, names))
        sums = {name: self._engines[name].ask("randomise", logit_std=std) for name in names}
        if len(set(sums.values())) != 1:
            raise SpecRolloutError(f"the engines' random weights differ: checksums {sums}", "report the model")
        return [{"name": name, **self._engines[name].ask("facts")} for name in names]

    def _start(self, name: str) -> None:
        scenario, arguments, own = self._scenario, self._scenario.arguments(), None
        if name == STOCK:
            arguments |= JUDGE
        else:
            own = scenario.spec_rollout(name, write_answers(self._scratch / f"{name}.json", {}))
        self._engines.start(name, own, **arguments)

    def row(self, cell: Cell, arm: str, nodes: int) -> Row:
        """Warm-up and rounds, the order alternating; or one run of each. Every run is compared with stock's beside."""
        engine, rounds = _engine_of(arm), self._scenario.rounds

        def run(one: str | None) -> Run:
            if one == STOCK and self._scenario.is_strict:
                return self._alone(cell)
            return self._run(engine if one else STOCK, cell, arm, nodes if one and one in OURS else None)

        with self._engines.doing(f"{arm} of {nodes}, {cell}"):
            taught, numbers = self._taught(cell, arm, nodes), range(-1, rounds) if rounds else [0]
            pairs = [run_round(number, [arm], run)[arm] for number in numbers]
        made = self._made(cell, arm, nodes, pairs)
        stale = {one.request for pair in pairs for one in partings(taught, pair.ours)} if taught else set()
        return made.but(stale=len(stale) if taught else None)

    def trace(self, cell: Cell, arm: str, nodes: int, joins: bool) -> dict[str, Any]:
        """What the device does in five steps, in the first of which prompts may join; docs/gpu.md has the fields."""
        engine = _engine_of(arm)
        self._taught(cell, arm, nodes)
        prompts, params = self._prime(engine, cell, arm), self._params(cell, arm, nodes if arm in OURS else None)
        # ends of contexts, which nobody has cached
        joining = [prompts[i % cell.batch][-_JOINING_LEN - i :] for i in range(_JOINING if joins else 0)]
        found = self._engines.ask(
            engine, "trace", prompts=prompts, params=params, at=_TRACED_AT, joining=joining, own=params[0]
        )
        title = f"{self._title(cell, arm, nodes)}{', prompts join' if joins else ''}"
        return {"name": title, **found}

    def _made(self, cell: Cell, arm: str, nodes: int, pairs: Sequence[Pair]) -> Row:
        """A row of these runs; no speed but of stock's tokens, or of others behind proven ties alone."""
        judged, is_strict = self._judged(cell, arm, pairs), self._scenario.is_strict or arm == STOCK
        row, last = proven_row(self._title(cell, arm, nodes), cell.batch, nodes, pairs, judged), pairs[-1]
        is_alone, totals = arm == STOCK and self._scenario.is_strict, last.ours.totals
        parted = {one.request: one.position for one in partings(last.stock, last.ours)}
        own: dict[str, Any] = {"step_ms": None, "stock_ms": None, **UNTOLD}
        if self._scenario.rounds and row.is_proven and not is_alone:
            own = {"step_ms": _step_ms(pair.ours for pair in pairs if pair.is_timed)}
            own |= {"stock_ms": _step_ms(pair.stock for pair in pairs if pair.is_timed)}
        if totals is not None:
            own |= {"drafted": totals.drafted, "accepted": totals.accepted, "branches": totals.branches_committed}
            if nodes and not totals.drafted:
                judged.differences.append("nothing was drafted, so nothing was checked")
        return row.but(
            passed=not judged.differences and (row.identical or not is_strict),
            is_proven=not judged.differences and not is_strict,
            compared=sum(parted.get(i, len(ids)) for i, ids in enumerate(last.stock.token_ids)),
            **own,
        )

    def _title(self, cell: Cell, arm: str, nodes: int) -> str:
        if arm == STOCK:
            return f"{arm}{', each alone' if self._scenario.is_strict else ''}, {cell}"
        return f"{arm} of {nodes}, {cell}"

    def _judged(self, cell: Cell, arm: str, pairs: Sequence[Pair]) -> Judged:
        """Every difference is put to stock: whether it met a tie itself, on the common prefix with the same seed."""
        prompts, params = _prompts(cell, BARE[self._scenario.model].vocab, arm), self._params(cell, arm)
        return judge(lambda: self._engines[STOCK], prompts, params, pairs, self._scenario.dtype, {}, MOST_ASKED)

    def _taught(self, cell: Cell, arm: str, nodes: int) -> Run | None:
        """Let the oracle draft our own answers, so that it stays right behind a tie; None: there is no oracle."""
        if arm not in ("chain", "tree"):
            return None
        engine, first = _engine_of(arm), self._scenario.accuracy
        # a tree's second choice holds half of what the first one misses
        accuracy = (first,) if arm == "chain" else (first, (1 - first) / 2)
        taught = self._run(STOCK, cell, arm)
        for _ in range(_LESSONS):
            path = write_answers(self._scratch / f"{engine}.json", {str(i): x for i, x in enumerate(taught.token_ids)})
            self._engines.tell(engine, "set_oracle", path=str(path), accuracy=list(accuracy))
            if not self._scenario.rounds:
                break
            run = self._run(engine, cell, arm, nodes)
            if run.token_ids == taught.token_ids:
                break
            taught = run
        return taught

    def _alone(self, cell: Cell) -> Run:
        """Each request by itself, in stock's engine: whether rows of others change its own, as they should not."""
        prompts, params = self._prime(STOCK, cell, STOCK), self._params(cell, STOCK)
        runs = [
            self._engines.run(STOCK, [prompt], [own], is_warm=True) for prompt, own in zip(prompts, params, strict=True)
        ]
        return replace(runs[0], token_ids=tuple(run.token_ids[0] for run in runs))

    def _run(self, name: str, cell: Cell, arm: str, nodes: int | None = None) -> Run:
        """The contexts come from the prefix cache, so the first step computes one token of each request."""
        return self._engines.run(name, self._prime(name, cell, arm), self._params(cell, arm, nodes), is_warm=True)

    def _prime(self, name: str, cell: Cell, arm: str) -> list[list[int]]:
        """Have the cell's contexts in the engine's prefix cache; the prompts."""
        prompts, wanted = _prompts(cell, BARE[self._scenario.model].vocab, arm), (cell, arm == "ngram")
        if self._primed.get(name) != wanted:
            self._engines.ask(name, "prime", prompts=prompts)
            self._primed[name] = wanted
        return prompts

    def _params(self, cell: Cell, arm: str, nodes: int | None = None) -> list[dict[str, Any]]:
        """Of each request: without drafts (nodes None), or with ours. Of `ngram`, every second one is greedy."""
        made = []
        for i in range(cell.batch):
            problem = {} if arm == "ngram" else {"problem_id": str(i)}
            own = None if nodes is None else {"max_draft_tokens": nodes, **problem}
            values = sampling(self._scenario.seed + i, self._scenario.tokens, own, is_to_the_end=True)
            if arm == "ngram":
                values |= {"temperature": float(i % 2), "allowed_token_ids": list(range(_ALLOWED))}
            made.append(values)
        return made


def _engine_of(arm: str) -> str:
    # drafts of the ngram arm grow beside the oracle's, in one engine
    return "tree" if arm == "ngram" else arm


def _prompts(cell: Cell, vocab: int, arm: str) -> list[list[int]]:
    """Random tokens: the context, and one token for the first step to compute. For `ngram` they repeat themselves."""
    rng = random.Random(f"{cell.batch}/{cell.context}/{arm == 'ngram'}")
    period = min(_PATTERN, cell.context // 2) if arm == "ngram" else cell.context + 1
    patterns = [rng.choices(range(vocab), k=period) for _ in range(cell.batch)]
    return [[pattern[i % period] for i in range(cell.context + 1)] for pattern in patterns]


def _step_ms(runs: Iterable[Run]) -> float | None:
    """Median over runs of the mean of all steps but the first, which also admits the requests."""
    means = [fmean(times) for run in runs if (times := run.step_ms())]
    return median_high(means) if means else None


bench_device = command(Device)
