"""Schedules of faults over V1 and V2 without an engine: vLLM's schedulers, our runners, a target of a line.

Each seed is a schedule of its own. A failing one prints what repeats it.
"""

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tests.e2e.identity.engines import model
from tests.e2e.schedulers import SCHEDULERS
from tests.faults.acting import MOST_DRAFTED
from tests.faults.breaking import DRAFTER_FAULTS, Errs
from tests.faults.devices import MOST_TOKENS
from tests.faults.hosts import KINDS, MOST_REQUESTS, Engine
from tests.faults.schedule import ACTS, Schedule
from tests.faults.seeds import ON_HOSTS, repeatable, seeds
from tests.faults.stand_ins import Grammars


class Bench:
    """Schedulers over a KV cache without memory."""

    block_size = 8

    def __init__(self, path: str) -> None:
        init_none_hash(sha256)
        self._config = EngineArgs(
            path, block_size=32, max_model_len=MOST_TOKENS, max_num_seqs=MOST_REQUESTS, max_num_batched_tokens=160,
            additional_config={"spec_rollout": {"max_draft_tokens": MOST_DRAFTED}},
        ).create_engine_config()  # fmt: skip
        self._config.cache_config.block_size = self.block_size
        self._config.scheduler_config.long_prefill_token_threshold = 16

    def scheduler(self, kind: str, blocks: int, grammars: Grammars) -> Any:
        config = self._config
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = kind.endswith("ahead")
        spec = FullAttentionSpec(block_size=self.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        scheduler: Any = SCHEDULERS[kind](
            vllm_config=config, kv_cache_config=cache, structured_output_manager=grammars, block_size=self.block_size
        )
        scheduler.use_v2_model_runner = kind != "v1"
        return scheduler


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(model(tmp_path_factory.mktemp("models"), "llama", "float32"))


def test_no_schedule_of_faults_changes_a_token_loses_a_request_or_leaves_anything_behind(bench, tmp_path) -> None:
    own, accepted, failed, seen, broke = seeds(ON_HOSTS), 0, set[str](), set[str](), set[tuple[str, str]]()
    for seed in own:
        with pytest.MonkeyPatch.context() as patch, repeatable(seed, __file__):
            engine = Engine(Schedule.of(seed), KINDS[seed % len(KINDS)], bench, str(tmp_path / str(seed)), patch)
            engine.carry_out()
        accepted += engine.runner.stats.accepted
        failed |= set(engine.speculator.guard.failures)
        seen |= engine.seen
        broke |= engine.broke
    if len(own) > 1:
        # that they try what they are for
        assert {act.what for seed in own for act in Schedule.of(seed).acts} == set(ACTS)
        faults = {("drafter", one) for one in DRAFTER_FAULTS} | {("budget", one) for one in (*Errs.METHODS, "")}
        assert broke == faults
        assert accepted > 10 * len(own) and failed == {"budget", "drafter broken", "watching"}
        asides = {"a drafter was in debt", "a drafter came back by itself", "a trace"}
        assert seen == asides | {"what was withheld was found again"}
