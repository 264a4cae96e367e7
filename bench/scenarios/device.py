"""`specrollout bench device`: ours beside stock vLLM on one GPU: whose tokens, how fast, and how long the device idles.

A model is a config.json and nothing else: vLLM makes its weights up, and every engine refills them in place, so that
the model chooses its tokens. `--dry` walks through the same code on a CPU, with tiny shapes.
"""

from __future__ import annotations

import bisect
import heapq
import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median_high
from typing import Any, ClassVar

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.config import BUDGETS, MAX_NODES
from vllm_specrollout.errors import SpecRolloutError

from ..kernels.shapes import Cell
from ..runner.engines import IN_ONE_PROCESS, STOCK, Engines, run_round, sampling, write_answers
from ..runner.interpreter import ENVIRONMENT as INTERPRETED
from ..runner.models import BARE, bare_model
from ..runner.report import Columns, Found, Table, same
from ..runner.rows import SPEEDS, Judged, Pair, Row, Run, grown, make_row, partings
from ..runner.scenario import EngineScenario, Session, command, flag
from ..runner.ties import JUDGE, judge

OURS = ("chain", "tree", "ngram")
RIVALS = ("vllm-ngram", "vllm-suffix", "vllm-draft_model")
"""vLLM's own methods."""
DRAFTS = {2.0: 3, 4.0: 7, 6.5: 15}
"""Tokens a step to reach -> draft nodes given to reach it."""
MOST_ASKED = 32
"""Differences of a row that stock is asked about; it is not asked about the others, so they are no proven ties."""
_LESSONS = 3  # runs after which our answers are taken to be what they are: a tie may turn each one's into others
_SLACK = 4  # a request may be given drafts beyond its last token
_PATTERN, _ALLOWED = 32, 12  # the ngram arm's prompts repeat so many tokens, its answers are made of so many


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow(Row):
    """One arm in one cell; `name` says which."""

    # whether outputs are stock's, proven ties apart where they are allowed; None: other tokens by design
    passed: bool | None
    is_proven: bool
    # where outputs part, in words
    ties: list[str]
    differences: list[str]
    # tokens up to the first difference, over all requests of the last run
    compared: int | None = None
    # of the last run: drafted nodes, accepted ones, steps that accepted another branch than the first
    drafted: int | None = None
    accepted: int | None = None
    branches: int | None = None
    # requests whose answers the oracle no longer knew, behind a tie
    stale: int | None = None
    # mean of a run's steps but the first, ours and stock's; None: not told
    step_ms: float | None = None
    stock_ms: float | None = None
    # per step: the device at work, as profiled; the rest of the step; the host waiting for tokens
    busy_ms: float | None = None
    idle_ms: float | None = None
    wait_ms: float | None = None
    # costliest first: name, milliseconds and launches of the profiled run
    kernels: list[list[Any]] | None = None


def _taus(text: str, flag: str) -> tuple[float, ...]:
    return tuple(map(float, cli_flags.names(text, flag, tuple(f"{tau:g}" for tau in DRAFTS))))


@dataclass(frozen=True, kw_only=True)
class Device(EngineScenario):
    """Compare ours with stock vLLM on one GPU, on a model of random weights: identity, speed, the device's idling."""

    bench: ClassVar[str] = "device"

    model: str = flag("0.5B", "Qwen2.5's shape of this size, or a tiny one.", choices=tuple(BARE))
    cells: tuple[Cell, ...] = flag(
        (Cell(1, 1024), Cell(8, 1024)), "BATCHxCONTEXT, the context cached beforehand.", parse=Cell.parse_all
    )
    arms: tuple[str, ...] = flag(
        OURS[:2],
        "Ours: chain, tree, ngram (beside the tree's oracle); stock again (strict: each alone); vLLM's own methods.",
        choices=(*OURS, STOCK, *RIVALS),
    )
    taus: tuple[float, ...] = flag((4.0,), "Tokens a step that the oracle is to reach: 2, 4, 6.5.", parse=_taus)
    nodes: int = flag(0, "Draft nodes of a request; 0: 3, 7 or 15, by `--taus`.", within=(0, MAX_NODES))
    tokens: int = flag(64, "Tokens generated per request.", within=(2, 1 << 14))
    logit_std: float = flag(1.0, "Of the logits: 1, the model chooses; 0.05, noise does, and ties are rare.")
    rounds: int = flag(0, "Timed rounds after a warm-up; 0: identity alone, once.", within=(0, 1000))
    is_profiled: bool = flag(False, "Also tell what the device does in a step.", "--profile")
    is_strict: bool = flag(False, "Batch-invariant kernels in both engines, and no tie is allowed.", "--strict")
    is_eager: bool = flag(False, "Without or with CUDA graphs, in both.", "--eager/--graphs")
    is_uncompiled: bool = flag(False, "Without torch's compiler: decoding in CUDA graphs alone.", "--uncompiled")
    budget: str = flag("fixed", "`fixed` drafts as told; `auto` drafts what pays.", choices=BUDGETS)
    is_dry: bool = flag(False, "On a CPU, each engine in one process; no figure means anything.", "--dry")
    is_interpreted: bool = flag(False, "Dry, on the V2 runner with its kernels interpreted.", "--interpreted")

    @property
    def most_nodes(self) -> int:
        return self.nodes or max(DRAFTS[tau] for tau in self.taus)

    @property
    def max_model_len(self) -> int:
        return max(cell.context for cell in self.cells) + Cell.BLOCK + self.tokens + self.most_nodes + _SLACK

    @property
    def kv_bytes(self) -> int:
        """KV cache that holds the largest cell to its end, with a block to spare per request."""
        room = self.tokens + self.most_nodes + 2 * Cell.BLOCK
        most = max(cell.batch * (cell.context + room) for cell in self.cells)
        model = BARE[self.model]
        return max(most, 2 * self.max_model_len) * model.layers * model.token_bytes

    @property
    def capture_sizes(self) -> list[int]:
        """Rows of a step that CUDA graphs are captured for: every batch, without drafts and with all of them."""
        nodes = {0, self.nodes} if self.nodes else {0, *(DRAFTS[tau] for tau in self.taus)}
        exact = {cell.batch * (1 + n) for cell in self.cells for n in nodes}
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
            "drafters": ["oracle", *(["ngram"] if "ngram" in self.arms else [])],
            "budget": self.budget,
            "shape": shape,
            "max_draft_tokens": self.most_nodes,
            "max_depth": self.most_nodes,
            "oracle": {"path": str(oracle)},
        }

    def environment(self) -> dict[str, str]:
        # functions are sent to workers, to make weights and to look
        changed = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "PYTHONFAULTHANDLER": "1"}
        if self.is_strict and not self.is_dry:
            # the compiler would time variants that add up in other orders, and each engine choose its own
            changed |= {"VLLM_BATCH_INVARIANT": "1", "TORCHINDUCTOR_DETERMINISTIC": "1"}
        return {**changed, **(IN_ONE_PROCESS if self.is_dry else {}), **(INTERPRETED if self.is_interpreted else {})}

    def measure(self, session: Session) -> Found:
        folder = bare_model(self.model, session.scratch / "model")
        arms = [(arm, tau) for tau in self.taus for arm in self.arms]
        report = session.display.steps(4 + len(self.cells) * len(arms))
        shape = {"seqs": max(cell.batch for cell in self.cells), "length": self.max_model_len, "width": 1}
        engines = self.make_engines(folder, report, **shape, is_eager=self.is_eager, environment=self.environment())
        with engines:
            bench = _Bench(self, engines, session.scratch)
            facts = bench.start()
            rows = [bench.row(cell, arm, tau) for cell in reversed(self.cells) for arm, tau in arms]
            if self.is_profiled:
                rows += [bench.profile(cell, STOCK, self.taus[0]) for cell in self.cells]
                told = [(arm, tau) for arm, tau in arms if arm in OURS]
                rows += [bench.profile(cell, arm, tau) for cell in self.cells for arm, tau in told]
        return Found(model=f"random weights, {self.model}", rows=rows, extra={"engines": facts})

    def title(self, found: Found) -> str:
        dry = "A DRY WALK, no figure means anything. " if self.is_dry else ""
        return f"{dry}{found.model}, {self.dtype}, logits of deviation {self.logit_std:g}"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield Table(found.extra["engines"], _ENGINES)
        yield Table(found.rows, _IDENTITY)
        if self.rounds or self.is_profiled:
            yield Table(found.rows, _SPEED)
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
    "row": "name",
    "right": "passed",
    **same("identical", "compared"),
    "ties": lambda row: len(row.ties),
    "unproven": lambda row: len(row.differences),
    **same("drafted", "accepted", "branches"),
    "steps": lambda row: f"{row.stock_steps} -> {row.steps}",
}
_SPEED: Columns = {
    "row": "name",
    "decode only": "decode_speedup x",
    "whole": "speedup x",
    "nodes/step": "nodes_per_step",
    "step ms": "step_ms",
    "stock ms": "stock_ms",
    "busy ms": "busy_ms",
    "idle ms": "idle_ms",
    "wait ms": "wait_ms",
    "stale": "stale",
    "costliest": lambda row: ", ".join(f"{name[:28]} {ms:.2f}" for name, ms, _ in (row.kernels or [])[:2]) or None,
}


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
        elif name in OURS:
            own = scenario.spec_rollout(name, write_answers(self._scratch / f"{name}.json", {}))
        else:
            arguments["speculative_config"] = self._rival(name.removeprefix("vllm-"))
        self._engines.start(name, own, **arguments)

    def _rival(self, method: str) -> dict[str, Any]:
        """vLLM's own method, told to accept drafts so that a step yields so many tokens (its `synthetic` option).

        Random weights accept nobody's drafts. What a method does not draft cannot be accepted: on random text `ngram`
        and `suffix` find little, and the number of steps says so.
        """
        tau, more = self._scenario.taus[0], {}
        if method == "ngram":
            more = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
        elif method == "draft_model":
            small = "0.5B" if self._scenario.model == "7B" else "tiny"
            vocab = BARE[self._scenario.model].vocab
            more = {"model": str(bare_model(small, self._scratch / "draft", vocab))}
        synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": tau}
        return {"method": method, "num_speculative_tokens": self._scenario.nodes or DRAFTS[tau], **synthetic, **more}

    def row(self, cell: Cell, arm: str, tau: float) -> DeviceRow:
        """Warm-up and rounds, the order alternating; or one run of each. Every run is compared with stock's beside."""
        engine, nodes, rounds = _engine_of(arm), self._nodes(tau), self._scenario.rounds

        def run(one: str | None) -> Run:
            if one == STOCK and self._scenario.is_strict:
                return self._alone(cell)
            return self._run(engine if one else STOCK, cell, arm, nodes if one and one in OURS else None)

        with self._engines.doing(f"{arm}, {tau:g} a step, {cell}"):
            taught = self._taught(cell, arm, tau)
            pairs = [run_round(number, [arm], run)[arm] for number in (range(-1, rounds) if rounds else [0])]
        made = self._made(cell, arm, tau, pairs)
        stale = {one.request for pair in pairs for one in partings(taught, pair.ours)} if taught else set()
        return replace(made, stale=len(stale) if taught else None)

    def profile(self, cell: Cell, arm: str, tau: float) -> DeviceRow:
        """A step's wall clock from a plain run, and how much of it the device works from a profiled one."""
        engine, nodes = _engine_of(arm), self._nodes(tau) if arm in OURS else None
        self._taught(cell, arm, tau)
        stock, run = self._run(STOCK, cell, arm), self._run(engine, cell, arm, nodes)
        made = self._made(cell, arm, tau, [Pair(stock=stock, ours=run)])
        prompts, params = self._prime(engine, cell, arm), self._params(cell, arm, nodes)
        found = self._engines.ask(engine, "profile", prompts=prompts, params=params)
        busy_ms = found["busy_ms"] / max(1, found["steps"])
        step_ms = _step_ms([run]) if made.passed else None
        idle_ms = None if step_ms is None else step_ms - busy_ms
        told = {"step_ms": step_ms, "busy_ms": busy_ms, "idle_ms": idle_ms, "kernels": found["kernels"]}
        return replace(made, name=f"device, {made.name}", stock_ms=None, **dict.fromkeys(SPEEDS), **told)

    def _made(self, cell: Cell, arm: str, tau: float, pairs: Sequence[Pair]) -> DeviceRow:
        """A row of these runs; no speed but of stock's tokens, or of others behind proven ties alone."""
        is_rival, last = arm in RIVALS, pairs[-1]
        judged = Judged() if is_rival else self._judged(cell, arm, pairs)
        is_told, totals = not judged.differences, last.ours.totals
        shown = [replace(p, ours=replace(p.ours, token_ids=p.stock.token_ids)) for p in pairs] if is_told else pairs
        is_alone = arm == STOCK and self._scenario.is_strict
        name = f"{arm}, {tau:g} a step, {cell}" if arm not in (STOCK, "ngram") else f"{arm}, {cell}"
        name = f"{arm}, each alone, {cell}" if is_alone else name
        is_identical, is_timed = is_told and not judged.ties, bool(self._scenario.rounds) and is_told and not is_alone
        if totals is not None and not totals.drafted:
            judged.differences.append("nothing was drafted, so nothing was checked")
        parted = {one.request: one.position for one in partings(last.stock, last.ours)}
        own: dict[str, Any] = {} if is_timed else dict.fromkeys(SPEEDS)
        if totals is not None:
            own |= {"drafted": totals.drafted, "accepted": totals.accepted, "branches": totals.branches_committed}
            own["wait_ms"] = totals.wait_ms / totals.steps
        if is_timed:
            own |= {"step_ms": _step_ms(pair.ours for pair in pairs if pair.is_timed)}
            own |= {"stock_ms": _step_ms(pair.stock for pair in pairs if pair.is_timed)}
        is_strict = self._scenario.is_strict or arm == STOCK
        return grown(
            DeviceRow,
            make_row(name, cell.batch, self._nodes(tau), shown),
            identical=None if is_rival else is_identical,
            passed=None if is_rival else not judged.differences and (is_identical or not is_strict),
            is_proven=not judged.differences and not is_strict,
            ties=judged.ties,
            differences=judged.differences,
            compared=None if is_rival else sum(parted.get(i, len(ids)) for i, ids in enumerate(last.stock.token_ids)),
            **own,
        )

    def _judged(self, cell: Cell, arm: str, pairs: Sequence[Pair]) -> Judged:
        """Every difference is put to stock: whether it met a tie itself, on the common prefix with the same seed."""
        prompts, params = _prompts(cell, BARE[self._scenario.model].vocab, arm), self._params(cell, arm)
        return judge(lambda: self._engines[STOCK], prompts, params, pairs, self._scenario.dtype, {}, MOST_ASKED)

    def _taught(self, cell: Cell, arm: str, tau: float) -> Run | None:
        """Let the oracle draft our own answers, so that it stays right behind a tie; None: there is no oracle."""
        if arm not in ("chain", "tree"):
            return None
        engine, accuracy = _engine_of(arm), accuracy_for(tau, self._nodes(tau), arm)
        taught = self._run(STOCK, cell, arm)
        for _ in range(_LESSONS):
            path = write_answers(self._scratch / f"{engine}.json", {str(i): x for i, x in enumerate(taught.token_ids)})
            self._engines.tell(engine, "set_oracle", path=str(path), accuracy=list(accuracy))
            if not self._scenario.rounds:
                break
            run = self._run(engine, cell, arm, self._nodes(tau))
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

    def _nodes(self, tau: float) -> int:
        return self._scenario.nodes or DRAFTS[tau]


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


def expected_tokens(accuracy: Sequence[float], nodes: int) -> float:
    """Tokens a step yields on average when the oracle drafts its best tree of `nodes` nodes with this accuracy."""
    total, reach = 1.0, [-share for share in accuracy]
    heapq.heapify(reach)
    for _ in range(nodes):
        best = -heapq.heappop(reach)
        total += best
        for share in accuracy:
            heapq.heappush(reach, -best * share)
    return total


def accuracy_for(tau: float, nodes: int, arm: str) -> tuple[float, ...]:
    """How often the oracle must be right, per rank, for `nodes` nodes to yield `tau` tokens a step.

    A tree's second rank holds half of what the first one misses.
    """

    def ranks(first: float) -> tuple[float, ...]:
        return (first,) if arm == "chain" else (first, (1 - first) / 2)

    low = bisect.bisect_left(range(1 << 40), tau, key=lambda i: expected_tokens(ranks(i / (1 << 40)), nodes)) - 1
    return tuple(round(share, 6) for share in ranks(low / (1 << 40)))


bench_device = command(Device)
