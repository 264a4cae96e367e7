"""`specrollout bench serving`: vLLM's own serving benchmark, stock and ours in turns, where drafts do not pay.

Prompts are random tokens, so nothing is known of how their answers go on: what a server with drafts loses there is what
it costs while it drafts nothing. Stock runs twice in each round, so the rows say how far stock is from itself.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from ..runner.engine_process import EngineFailed
from ..runner.fields import Row
from ..runner.models import find_model
from ..runner.report import Found, Table
from ..runner.results import SERVING
from ..runner.rows import quartiles
from ..runner.scenario import EngineScenario, Session, command, flag
from ..runner.server import NAME, VLLM, Server, serve

STOCK, AGAIN = "stock", "stock again"
ARMS: dict[str, dict[str, Any] | None] = {STOCK: None, AGAIN: None, "ours": {}, "ours, off": {"budget": "off"}}
"""What is measured -> our configuration; None: stock."""
_PROBES = 32


@dataclass(frozen=True, kw_only=True)
class RandomServing(EngineScenario):
    """Serve random prompts (`vllm bench serve`), stock and ours in turns: what drafting costs where it does not pay."""

    bench: ClassVar[str] = "serving"

    size: str | None = flag(None, "The policy at the cost of a model of this size, such as 150M.")
    batch: int = flag(32, "Requests at once.", within=(1, 256))
    requests: int = flag(256, "Requests of a round.", within=(8, 1 << 14))
    prompt: int = flag(48, "Tokens of a prompt.", within=(1, 512))
    tokens: int = flag(120, "Tokens of an answer.", within=(2, 512))
    rounds: int = flag(3, "Rounds, of one server each way; the medians are reported.", within=(1, 100))

    def measure(self, session: Session) -> Found:
        model, title = find_model(None, self.size, self.dtype, self.cache, session.display, is_policy=True)
        report = session.display.steps(len(ARMS) * self.rounds)
        flags = ["--dtype", self.dtype, "--max-model-len", "1024", "--max-num-seqs", str(self.batch)]
        answers: dict[str, list[list[int]]] = {}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
        with patch.dict("os.environ", {"VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib)}):
            for number in range(self.rounds):
                # each round begins with another one, so that none is always behind the same
                turn = list(ARMS)[number % len(ARMS) :] + list(ARMS)[: number % len(ARMS)]
                for name in turn:
                    report(f"round {number + 1}: {name}", 1)
                    # one at a time: a server that waits is taken for cold, and is slow when its turn comes
                    with serve(model, flags, ARMS[name], is_verbose=self.verbose) as server:
                        seeded = self._answers(server)
                        found[name].append(self._round(server, model, number, session.scratch))
                    if answers.setdefault(name, seeded) != seeded:
                        raise EngineFailed(f"{name} gave other tokens for the same seeds", "report it")
        rows = [self._row(name, own, found[STOCK], answers[name] != answers[STOCK]) for name, own in found.items()]
        return Found(model=title, rows=rows)

    def _answers(self, server: Server) -> list[list[int]]:
        """Token ids of seeded answers to prompts that come at once, of which none ends early."""

        def ask(number: int) -> list[int]:
            prompt = [(7 * number + 13 * i) % 390 + 5 for i in range(self.prompt)]
            asked = {"model": NAME, "prompt": prompt, "max_tokens": self.tokens, "seed": number, "temperature": 1.0}
            body = json.dumps({**asked, "ignore_eos": True, "return_token_ids": True}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{server.address}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=600) as answer:
                return list(json.load(answer)["choices"][0]["token_ids"])

        with ThreadPoolExecutor(_PROBES) as pool:
            return list(pool.map(ask, range(_PROBES)))

    def _round(self, server: Server, model: Path, number: int, scratch: Path) -> dict[str, float]:
        """What vLLM's benchmark says of one round."""
        out = scratch / "serving.json"
        command = [*(str(VLLM), "bench", "serve", "--base-url", server.address), "--model", NAME]
        command += ["--tokenizer", str(model), "--dataset-name", "random", "--ignore-eos", "--disable-tqdm"]
        command += ["--random-input-len", str(self.prompt), "--random-output-len", str(self.tokens)]
        command += ["--max-concurrency", str(self.batch), "--num-prompts", str(self.requests)]
        command += ["--seed", str(self.seed + number + 1), "--save-result", "--result-filename", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not out.exists():
            raise EngineFailed(f"`vllm bench serve` failed:\n{done.stderr[-2000:]}", "run it by hand")
        said = json.loads(out.read_text(encoding="utf-8"))
        out.unlink()
        if said["completed"] != self.requests:
            raise EngineFailed(
                f"{said['completed']} of {self.requests} requests were answered", "run again with --verbose"
            )
        return {"tokens_per_s": said["output_throughput"], "token_us": 1e3 * said["mean_tpot_ms"]}

    def _row(self, name: str, own: list[dict[str, float]], stock: list[dict[str, float]], differs: bool) -> Row:
        """One arm. Ratios are of tokens a second, over stock's of the same round; so is what an output token takes."""
        row = Row(name=name, identical=not differs, rounds=self.rounds)
        if differs:
            return row
        ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(own, stock, strict=True)]
        return row.but(
            tokens_per_s=statistics.median(one["tokens_per_s"] for one in own),
            ratio=statistics.median(ratios),
            ratio_quartiles=quartiles(ratios),
            added_us=statistics.median(a["token_us"] - b["token_us"] for a, b in zip(own, stock, strict=True)),
        )

    def title(self, found: Found) -> str:
        shape = f"prompts of {self.prompt} random tokens, answers of {self.tokens}, {self.batch} at once"
        return f"{found.model}, {self.dtype}, {shape}"

    def told(self, found: Found) -> Iterator[Table | str]:
        yield Table(found.rows, SERVING)


bench_serving = command(RandomServing)
