"""Two devices: what a pass of a drafter costs, and what a drafter on the second one brings to a target on the first.

    python -m bench.gpu.two_gpus --out DIR            # two GPUs: the target on cuda:0, the drafter on cuda:1
    python -m bench.gpu.two_gpus --dry --out DIR      # on two CPU cores, with a tiny model

First come passes of a drafter with its share of a GPU: of so many running requests, with none, one and all of them
asked anew. They decide whether a lent drafter can pay, and drafts as resumed requests (docs/concepts/decoupled.md).
The last row is its sleep: how long it takes to give its memory back, and to draft again. Then a target decodes with
its own copy as its drafter, whose every token is met, beside stock vLLM: a speed is told only where all tokens are
stock's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm_specrollout.cluster.child import Command

BATCHES, PASSES, PROMPT = (1, 4, 16, 32), 60, 256


def passes(model: str, engine_args: dict[str, Any], takes_up: bool) -> list[dict[str, float]]:
    """Milliseconds of a pass, by how many of its requests are new."""
    from vllm_specrollout.cluster.line import Ask
    from vllm_specrollout.cluster.messages import Sampling
    from vllm_specrollout.worker.drafter_engine import DrafterEngine

    engine = DrafterEngine(model, engine_args, takes_up=takes_up)
    rows, count = [], 0
    for batch in BATCHES:
        running: list[str] = []
        found: dict[str, list[float]] = {"none": [], "one": [], "all": []}
        for number in range(PASSES):
            kind = ("none", "one", "all")[number % 3]
            stale = running[: {"none": 0, "one": 1, "all": batch}[kind]] if running else []
            begin = time.perf_counter()
            engine.abort(stale)
            running = [name for name in running if name not in stale]
            while len(running) < batch:
                name, count = str(count), count + 1
                tokens = [5 + (len(running) * 7 + i) % 200 for i in range(PROMPT + number)]
                engine.add(Ask(name, tokens, PROMPT, 2 * PASSES, True), Sampling(1.0, seed=len(running)))
                running.append(name)
            engine.step()
            if number >= 6:
                found[kind].append((time.perf_counter() - begin) * 1e3)
        engine.abort(running)
        rows.append({"batch": batch, **{kind: round(statistics.median(own), 3) for kind, own in found.items()}})
    spent: dict[str, list[float]] = {"sleep": [], "wake": []}
    for _ in range(3):
        for kind, rest in (("sleep", engine.sleep), ("wake", engine.wake)):
            begin = time.perf_counter()
            rest()
            spent[kind].append((time.perf_counter() - begin) * 1e3)
    rows.append({f"{kind}_ms": round(statistics.median(own), 1) for kind, own in spent.items()})
    engine.shutdown()
    return rows


def beside(model: str, draft: str, device: str, engine_args: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
    """Stock vLLM and an engine with a drafter elsewhere, in turns."""
    from vllm import LLM, SamplingParams

    drafter = {key: value for key, value in engine_args.items() if key != "gpu_memory_utilization"}
    own = {
        "drafters": [],
        "placement": "decoupled",
        "devices": [device],
        "speculative_config": {"method": "draft_model", "model": draft, "num_speculative_tokens": 4},
        "decoupled": {"engine_args": drafter, "window": 8},
    }
    stock = LLM(model=model, **engine_args)
    ours = LLM(model=model, **engine_args, spec_rollout=own)
    rows = []
    for batch in (1, 8, 32):
        prompts = [{"prompt_token_ids": [5 + (i * 7 + k) % 200 for k in range(32)]} for i in range(batch)]
        params = [SamplingParams(seed=i, max_tokens=tokens, ignore_eos=True, detokenize=False) for i in range(batch)]
        seconds: dict[str, list[float]] = {"stock": [], "ours": []}
        identical, before = True, ours.collective_rpc("drafters_state")[0]["drafter"]
        for _ in range(4):
            answers = {}
            for name, llm in (("stock", stock), ("ours", ours)):
                begin = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds[name].append(time.perf_counter() - begin)
                answers[name] = [list(one.outputs[0].token_ids) for one in outputs]
            identical = identical and answers["stock"] == answers["ours"]
        after = ours.collective_rpc("drafters_state")[0]["drafter"]
        row = {"batch": batch, "identical": identical}
        row |= {name: after[name] - before[name] for name in ("tried", "matched", "covered", "nodes", "malformed")}
        if identical:
            row["speed"] = round(statistics.median(seconds["stock"][1:]) / statistics.median(seconds["ours"][1:]), 3)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="", help="folder or name; default: random weights")
    parser.add_argument("--draft", default="", help="of the drafter; default: the model itself")
    parser.add_argument("--device", default="", help="of the drafter; default: cuda:1, or the last core in a dry walk")
    parser.add_argument("--dry", action="store_true", help="on CPU, with a tiny model")
    parser.add_argument("--only", choices=("passes", "beside"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    device = given.device or (f"cpu:{max(os.sched_getaffinity(0))}" if given.dry else "cuda:1")
    args: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 64}
    args |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28} if given.dry else {}
    model = given.model or _random_model(
        given.out, "1M" if given.dry else "400M", "float32" if given.dry else "bfloat16"
    )
    if given.only == "passes":
        from vllm_specrollout.worker.models.decoupled import SHARE

        print(json.dumps(passes(model, args if given.dry else {**args, **SHARE}, takes_up=given.dry)))
        return
    if given.only == "beside":
        share = {} if given.dry else {"gpu_memory_utilization": 0.4}
        print(json.dumps(beside(model, given.draft or model, device, {**args, **share}, 64 if given.dry else 512)))
        return
    found = {}
    drafter = Command.of(model, [device], args)
    for part, environment in (("passes", drafter.environment), ("beside", dict(os.environ))):
        more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if given.dry or part == "passes" else {}
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu.two_gpus", *sys.argv[1:], "--only", part, "--device", device],
            env={**environment, **more},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
        found[part] = json.loads(lines[-1]) if done.returncode == 0 and lines else {"failed": done.returncode}
        (given.out / "two_gpus.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        print(part, json.dumps(found[part], indent=1), flush=True)
    wrong = any("failed" in rows or any(not row.get("identical", True) for row in rows) for rows in found.values())
    raise SystemExit(int(wrong))


def _random_model(out: Path, size: str, dtype: str) -> str:
    from bench.policy.random_model import make_random_model

    path = out / f"model-{size}"
    if not path.exists():
        make_random_model(path, arch="llama", size=size, dtype=dtype, seed=7)
    return str(path)


if __name__ == "__main__":
    main()
