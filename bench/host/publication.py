"""Steps around the publication of a head: is any longer than usual. Run: `python -m bench.host.publication --gib 1`.

An engine of a small target decodes with an EAGLE head of dummy widths. Other weights of its shape are loaded amid the
steps, as a server does it: one call between two steps. The step at which they are exchanged counts with its calls.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm_specrollout.bench.policy.random_model import make_random_model

from tests.e2e.drafting_models import copied, eagle_head

REQUESTS, TIMES = 4, 3
"""Requests that decode, and loads of each kind of step."""


def heads(folder: Path, gib: float) -> tuple[Path, Path, Path]:
    """A target, and two heads of that size in float32."""
    target = folder / "target"
    make_random_model(target, arch="llama", size="3M", dtype="float32", seed=7)
    config = json.loads((target / "config.json").read_text())
    wide = folder / "wide"
    shutil.copytree(target, wide)
    config["intermediate_size"] = int(gib * 2**30 / 4 / 3 / config["hidden_size"]) // 64 * 64
    (wide / "config.json").write_text(json.dumps(config))
    first = Path(eagle_head(str(wide), folder / "first"))
    return target, first, Path(copied(str(first), folder / "second", lambda weight: weight * 1.01))


def steps(llm: Any, *, has_drafts: bool) -> Iterator[float]:
    """Seconds of decode steps, for ever."""
    from vllm import SamplingParams

    engine, count = llm.llm_engine, 0
    extra = {} if has_drafts else {"spec_rollout": {"enabled": False}}
    while True:
        while len(engine.output_processor.request_states) < REQUESTS:
            params = SamplingParams(temperature=1.0, seed=count, max_tokens=1500, ignore_eos=True, extra_args=extra)
            engine.add_request(f"{has_drafts}-{count}", {"prompt_token_ids": [5 + count % 50, 7, 9]}, params)
            count += 1
            engine.step()
        begin = time.perf_counter()
        engine.step()
        yield time.perf_counter() - begin


def load(llm: Any, path: Path, each: Iterator[float]) -> tuple[list[float], float]:
    """Seconds of the steps while it loads, each with the call before it; and of the last call, which exchanges."""
    from vllm_specrollout.server.reports import loading

    conversation, answers, found, called = loading(path), None, [], 0.0
    while True:
        try:
            call = conversation.send(answers)
        except StopIteration:
            return found, called
        begin = time.perf_counter()
        answers = [llm.collective_rpc(call.method, args=call.args)]
        called = time.perf_counter() - begin
        found.append(called + next(each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the head")
    given = parser.parse_args()
    from vllm import LLM

    with tempfile.TemporaryDirectory() as scratch:
        target, *paths = heads(Path(scratch), given.gib)
        speculative = {"method": "eagle", "model": str(paths[0]), "num_speculative_tokens": 2}
        own = {"drafters": [], "budget": "fixed", "max_draft_tokens": 4, "max_depth": 2, "profile": "off"}
        llm = LLM(
            str(target), dtype="float32", max_model_len=2048, max_num_seqs=REQUESTS, enforce_eager=True,
            additional_config={"spec_rollout": {**own, "speculative_config": speculative}},
        )  # fmt: skip
        for has_drafts in (True, False):
            each, name = steps(llm, has_drafts=has_drafts), "with drafts" if has_drafts else "plain"
            for i in range(TIMES):
                amid, exchange = load(llm, paths[(i + has_drafts) % 2], each)
                # as many: a host's own pauses are found in either
                usual = sorted(next(each) for _ in amid)
                middle = statistics.median(usual)
                print(
                    f"{name}: usual {1e3 * middle:.2f} ms (longest of {len(usual)} {usual[-1] / middle:.2f} times);"
                    f" while {given.gib:g} GiB load {statistics.median(amid) / middle:.2f}, longest"
                    f" {max(amid) / middle:.2f} in {sum(amid):.1f} s; exchange {1e3 * exchange:.2f} ms",
                    flush=True,
                )
            llm.llm_engine.abort_request(list(llm.llm_engine.output_processor.request_states), internal=True)


if __name__ == "__main__":
    main()
