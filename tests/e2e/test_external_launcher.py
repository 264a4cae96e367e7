"""Two CPU ranks that schedule for themselves, as trainers start them with vLLM inside their own processes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import IO, Any

import pytest

pytest.importorskip("vllm")

from tests import warm

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    llm = LLM(sys.argv[1], dtype="float32", tensor_parallel_size=2, distributed_executor_backend="external_launcher",
              enforce_eager=True, max_model_len=256, max_num_seqs=3, seed=5,
              additional_config={"spec_rollout": {"drafters": ["history", "ngram"], "ngram": {"min_match": 1}}})
    prompts = [{"prompt_token_ids": [9 + i // 2, 40, 41, 42, 9 + i // 2, 40, 41, 42, 9]} for i in range(6)]
    result = {}
    for name, own in (("plain", {"enabled": False}), ("first", {}), ("second", {})):
        params = [SamplingParams(temperature=0.0 if i % 3 == 0 else 0.8, seed=i, max_tokens=12 + 6 * i, ignore_eos=True,
                                 extra_args={"spec_rollout": own}) for i in range(6)]
        result[name] = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
    unseeded = SamplingParams(max_tokens=16, ignore_eos=True)
    result["unseeded"] = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, unseeded, use_tqdm=False)]
    core = llm.llm_engine.engine_core.engine_core
    (stats,) = llm.collective_rpc("spec_rollout_stats")
    result["drafted"], result["accepted"] = stats["drafted"], stats["accepted"]
    result["drafts"] = core.model_executor.driver_worker.worker.model_runner.drafting.is_drafting
    print("RESULT" + json.dumps(result))
    core.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.mark.nightly
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_two_ranks_in_processes_of_their_own_draft_and_yield_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    from vllm_specrollout.bench.policy.random_model import make_random_model

    # two heads for keys and values, one for each rank
    model = str(make_random_model(tmp_path / "model", arch="llama", size="3M", dtype="float32"))
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _unlink_shared_memory()
    try:
        first, other = _run([str(script), model], port, tmp_path)
    finally:
        _unlink_shared_memory()
    assert (first.pop("drafts"), other.pop("drafts")) == (True, False)
    assert first == other
    assert first["plain"] == first["first"] == first["second"]
    assert first["accepted"] > 20


def _unlink_shared_memory() -> None:
    """vLLM's CPU ranks leave theirs behind, and for `env://` it has the same name in every run."""
    for path in Path("/dev/shm").glob("-*-cpushm_*"):
        path.unlink(missing_ok=True)


def _run(program: list[str], port: int, folder: Path) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        ranks = [
            warm.Process(program, {**os.environ, **_environment(rank, port)}, (file.fileno(),) * 2, folder=folder)
            for rank, file in enumerate(files)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        for rank in ranks:
            rank.wait(timeout=300)
        return [_result(file) for file in files]


def _result(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    text = file.read()
    lines = [line for line in text.splitlines() if line.startswith("RESULT")]
    assert lines, text[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT"))


def _environment(rank: int, port: int) -> dict[str, str]:
    return {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
