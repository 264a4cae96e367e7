"""Decode steps beside a trainer on another core, against the same steps while it is halted.

Run: `python -m bench.host.beside_trainer`, on two cores with nothing else. The engine has core 0 for itself. Rounds of
the same requests alternate: trainer halted, trainer training, halted. The two halted ones tell the host's own scatter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from vllm_specrollout.bench.policy import CHECKPOINT, HEAD
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tokenizer import prompt_text

ANSWERS, BATCH, TOKENS = 640, 16, 48


def start(folder: str, devices: list[str]) -> Any:
    from vllm import LLM

    own = {
        "drafters": [], "budget": "fixed", "max_draft_tokens": 4, "profile": "off",
        "speculative_config": {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 4},
        "train": {"mode": "auto", "dir": folder, "devices": devices},
    }  # fmt: skip
    return LLM(
        str(CHECKPOINT), dtype="float32", max_model_len=512, max_num_seqs=32, enforce_eager=True,
        additional_config={"spec_rollout": own},
    )  # fmt: skip


def decode(llm: Any, prompts: list[Any]) -> list[float]:
    """Seconds of the steps after the prefill's."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    for i in range(BATCH):
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=TOKENS, ignore_eos=True)
        engine.add_request(str(i), prompts[i], params)
    found = []
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - begin)
    return found[2:]


def learnt(llm: Any, prompts: list[Any]) -> Any:
    """The engine's learning, with a trainer that has rows and was never told to begin by a match rate."""
    from vllm import SamplingParams

    from vllm_specrollout.server.learning import learn
    from vllm_specrollout.training import spot

    spot.needs_learning = lambda _: True  # it would rest, as its head is a good one
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=120) for i in range(len(prompts))]
    llm.generate(prompts, params, use_tqdm=False)
    while learn(llm, 2.0)["trainer_rows"] == 0:
        pass
    return llm.spec_rollout_learning._trainer


def heard(trainer: Any, seconds: float) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        trainer.hear()
        time.sleep(0.05)
    return trainer.hear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llm = start(folder, ["cpu:1"])
        tokenizer = llm.get_tokenizer()
        chosen = problems(ANSWERS, seed=3, split="train")
        prompts = [
            {"prompt_token_ids": tokenizer.encode(prompt_text(p.prompt), add_special_tokens=False)} for p in chosen
        ]
        trainer = learnt(llm, prompts)
        ratios: list[float] = []
        scatter: list[float] = []
        worked = trainer.said.seconds
        for _ in range(given.rounds):
            times = []
            for trains in (False, True, False):
                trainer.tell(is_halted=not trains, learning=trainer.said.ended + 1)
                steps = heard(trainer, 0.6).steps
                times.append(statistics.median(decode(llm, prompts)))
                done = heard(trainer, 0.2).steps - steps
                assert trains or done == 0, (done, trainer.said)
            ratios.append(times[1] / statistics.mean((times[0], times[2])))
            scatter.append(times[2] / times[0])
        worked = heard(trainer, 1.0).seconds - worked  # steps, and judgements, of which a halt ends one
        assert worked > 0.0, trainer.said
        print(f"the trainer worked for {worked:.1f} s")
        for name, values in (("training / halted", ratios), ("halted / halted", scatter)):
            low, middle, high = statistics.quantiles(values, n=4)
            print(
                f"{name}: step time {middle:.3f}x ({low:.3f} to {high:.3f}), usual {1e3 * times[0]:.2f} ms", flush=True
            )
        llm.spec_rollout_learning.close()


if __name__ == "__main__":
    main()
