"""An engine's check of itself: it passes as it is, and a fault in any part takes away what rests on that part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm import envs
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm_specrollout.kernels.kv_commit import kernel as kv_commit
from vllm_specrollout.kernels.tree_attention import kernel as tree_attention
from vllm_specrollout.kernels.tree_verify import kernel as tree_verify

from tests.e2e.identity.engines import Engine, engine
from tests.v2.models import small_model
from vllm_specrollout.observe import self_check as record
from vllm_specrollout.observe.self_check import Record
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.request import Admissions
from vllm_specrollout.worker.v2 import self_check as module
from vllm_specrollout.worker.v2.commit import SlotMover
from vllm_specrollout.worker.v2.inputs import TreeInputs
from vllm_specrollout.worker.v2.runner import SpecRolloutV2
from vllm_specrollout.worker.v2.self_check import SelfCheck

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 768, "max_num_batched_tokens": 256}
DRAFTS = {"max_draft_tokens": 8, "self_check": "always"}


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("cache")
    patch.setenv("VLLM_CACHE_ROOT", envs.VLLM_CACHE_ROOT)
    patch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> Iterator[Engine]:
    path = small_model(tmp_path_factory.mktemp("model"), "qwen3", "float32")
    with engine(path, "float32", is_ours=True, spec_rollout=DRAFTS, **OPTIONS) as made:
        yield made


@pytest.fixture
def runner(ours: Engine) -> Iterator[Any]:
    """As it was when it had passed."""
    runner = ours.runner
    yield runner
    runner.shape, runner.admissions, runner.verifier.has_kernel = (DraftMode.TREE, ""), Admissions(DraftMode.TREE), True
    runner.draft_graphs.trees = None


def checked(runner: Any, folder: Path) -> SelfCheck:
    check = SelfCheck(runner, Record("key", folder), is_wanted=True)
    check.run()
    return check


class Mutant:
    """A kernel that does something else once it is done, or before."""

    def __init__(self, kernel: Any, change: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        self.kernel, self.change = kernel, change

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.change(self.kernel[grid], args, kwargs)


def test_an_engine_starts_checked_and_passes_every_part(ours: Engine, own_cache: Path) -> None:
    found = ours.llm.collective_rpc("spec_rollout_stats")[0]["self_check"]
    assert found["state"] == "passed" and not found["failed"]
    # there are no graphs here
    assert set(found["passed"]) == set(record.PARTS) - {record.TREE_GRAPHS}
    assert ours.runner.shape == (DraftMode.TREE, "") and ours.runner.verifier.has_kernel
    assert [path.suffix for path in (own_cache / "vllm-specrollout/self-check").iterdir()] == [".passed"]


def test_nothing_of_the_check_is_left_in_the_engine(ours: Engine) -> None:
    runner = ours.runner
    assert not runner.req_states.req_id_to_index and not runner.host.num_in_flight
    assert not runner.admissions.reasons() and not runner.stats.steps
    assert all(not cache.any() for cache in runner.kv_caches)
    assert "drafters_alive/worker" in runner.metrics._counts


def test_what_was_passed_once_is_not_compared_again_but_steps_are(runner: Any, tmp_path: Path) -> None:
    assert checked(runner, tmp_path).passed == list(record.PARTS[:-1])
    assert checked(runner, tmp_path).passed == list(record.PARTS[1:-1])


# --- faults -----------------------------------------------------------------------------------------------------------


def _shifted_noise(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    names = ("logits", "stride", "index", "temperature", "seeds", "pos")
    run(*args[:5], args[names.index("pos")] + 1, *args[6:], **kwargs)


def _short_walk(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    run(*args, **kwargs)
    args[7].clamp_(max=2)


def _scaled(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    run(*args, **kwargs)
    args[3].mul_(1.1)


def _all_seen(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Each node sees the first one, which is a wrong sibling."""
    run(*args[:7], args[7] | 1, *args[8:], **kwargs)


def _other_base(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    run(*args[:4], args[4] / 0.6931, *args[5:], **kwargs)


def _beside(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    run(args[0], args[1] + 1, *args[2:], **kwargs)


def _nothing(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """It is not launched."""


def _never_ends(*args: Any) -> str:
    while True:
        time.sleep(0.01)


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("out of resource: shared memory, Required: 106496, Hardware limit: 101376")


Plant = Callable[[pytest.MonkeyPatch, Any], None]


def _kernel(owner: Any, name: str, change: Any) -> Plant:
    return lambda patch, runner: patch.setattr(owner, name, Mutant(getattr(owner, name), change))


def _uncommitted(patch: pytest.MonkeyPatch, runner: Any) -> None:
    stock = SpecRolloutV2.sample

    def sample(self: Any, *args: Any) -> Any:
        found = stock(self, *args)
        self.step.accepted = None
        return found

    patch.setattr(SpecRolloutV2, "sample", sample)


def _context_off_by(tokens: int, nodes: int) -> Plant:
    """Contexts that seem longer than they are, by so many tokens and by their nodes times so much."""
    stock = TreeInputs.set_drafted

    def write(self: Any, *args: Any) -> None:
        stock(self, *args)
        self.context_lens += torch.where(self.num_nodes > 0, tokens + nodes * self.num_nodes, 0)

    return lambda patch, runner: patch.setattr(TreeInputs, "set_drafted", write)


def _one_layer(patch: pytest.MonkeyPatch, runner: Any) -> None:
    patch.setattr(runner, "mover", SlotMover(runner.kv_caches[:1]))


def _other_tokens(patch: pytest.MonkeyPatch, runner: Any) -> None:
    stock = TreeInputs.set_drafted

    def write(self: Any, batch: Any, drafted: Any) -> None:
        others = drafted.clone()
        others[:, 0] = torch.where(others[:, 0] < 0, -1, (others[:, 0] + 1) % runner.vocab_size)
        stock(self, batch, others)

    patch.setattr(TreeInputs, "set_drafted", write)


def _part(owner: Any, name: str, value: Any) -> Plant:
    return lambda patch, runner: patch.setattr(owner, name, value)


TREE, CHAIN, OFF = DraftMode.TREE, DraftMode.CHAIN, DraftMode.OFF
FAULTS: dict[str, tuple[Plant, str, DraftMode, bool]] = {
    "noise of the next position": (_kernel(tree_verify, "_sample_blocks", _shifted_noise), record.VERIFY, CHAIN, False),
    "a walk that stops early": (_kernel(tree_verify, "_walk_trees", _short_walk), record.VERIFY, CHAIN, False),
    "attention scaled": (_kernel(tree_attention, "_attend", _scaled), record.ATTENTION, CHAIN, True),
    "nodes that are not merged": (_kernel(tree_attention, "_attend", _nothing), record.ATTENTION, CHAIN, True),
    "siblings that are seen": (_kernel(tree_attention, "_attend", _all_seen), record.ATTENTION, CHAIN, True),
    "sums by another base": (_kernel(tree_attention, "_attend", _other_base), record.ATTENTION, CHAIN, True),
    "a context that holds nodes": (_context_off_by(0, 1), record.ATTENTION, CHAIN, True),
    "a context of the step before": (_context_off_by(-1, 0), record.ATTENTION, CHAIN, True),
    "slots that are not moved": (_kernel(kv_commit, "_move", _nothing), record.COMMIT, CHAIN, True),
    "a slot that is moved beside its place": (_kernel(kv_commit, "_move", _beside), record.COMMIT, CHAIN, True),
    "a layer that is not moved": (_one_layer, record.COMMIT, CHAIN, True),
    "a step that is not committed": (_uncommitted, record.COMMIT, CHAIN, True),
    "positions by row": (_part(TreeInputs, "shift_positions", lambda *args: None), record.TREES, CHAIN, True),
    "tokens that were not drafted": (_other_tokens, record.CHAINS, OFF, False),
    "an exception": (_kernel(tree_attention, "_attend", _raises), record.ATTENTION, CHAIN, True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_takes_away_what_rests_on_it(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plant, part, shape, has_kernel = FAULTS[fault]
    plant(monkeypatch, runner)
    found = checked(runner, tmp_path)
    assert part in found.failed, found.failed
    assert (runner.shape[0], runner.verifier.has_kernel) == (shape, has_kernel)
    assert part in runner.shape[1] and runner.admissions.model_shape is shape
    assert not list(tmp_path.glob("*.pending")) and not list(tmp_path.glob("*.passed"))


def test_a_part_that_hangs_is_left_and_counts_as_failed(runner: Any, tmp_path: Path) -> None:
    check = SelfCheck(runner, Record("key", tmp_path), is_wanted=True, seconds_a_part=0.5)
    assert not check.part(record.COMMIT, _never_ends)
    check.apply()
    assert "HungError" in check.failed[record.COMMIT] and runner.shape[0] is CHAIN


class Replayed:
    """Stands in for captured graphs: runs the model on the step's buffers, as a graph would."""

    def __init__(self, runner: Any, is_wrong: bool) -> None:
        self.runner, self.is_wrong, self.step, self.count = runner, is_wrong, None, 0
        self.prepare = runner.model_state.prepare_attn

    def keep(self, batch: Any, mode: Any, tables: Any, slots: Any, *args: Any, **kwargs: Any) -> Any:
        found = self.prepare(batch, mode, tables, slots, *args, **kwargs)
        self.step = (batch, found, build_slot_mappings_by_layer(slots, self.runner.kv_cache_config))
        return found

    def dispatch(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        most = kwargs.get("max_query_len")
        return BatchExecutionDescriptor(CUDAGraphMode.FULL, num_tokens, num_reqs, max_query_len=most)

    @property
    def graphs(self) -> Any:
        return self

    def __contains__(self, desc: Any) -> bool:
        return True

    def run_fullgraph(self, desc: Any) -> Any:
        batch, metadata, slots = self.step
        self.count += 1
        config, model = self.runner.vllm_config, self.runner.model
        with set_forward_context(metadata, config, num_tokens=desc.num_tokens, slot_mapping=slots):
            found = model(input_ids=batch.input_ids, positions=batch.positions, intermediate_tensors=None)
        return found + 1.0 if self.is_wrong else found


@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "wrong"])
def test_graphs_are_replayed_and_one_that_is_wrong_is_not_used(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    made = Replayed(runner, is_wrong)
    monkeypatch.setattr(runner.model_state, "prepare_attn", made.keep)
    runner.draft_graphs.trees = made
    found = checked(runner, tmp_path)
    part = record.TREE_GRAPHS
    assert made.count >= 1 and (part in found.failed) is is_wrong and (part in found.passed) is not is_wrong
    assert runner.draft_graphs.trees is (None if is_wrong else made)
    assert runner.shape[0] is (CHAIN if is_wrong else TREE)


def test_graphs_that_no_step_of_the_check_fits_into_are_not_used_and_cost_no_trees(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Replayed(runner, is_wrong=False)
    none = BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens=1, num_reqs=1)
    monkeypatch.setattr(made, "dispatch", lambda *args, **kwargs: none)
    runner.draft_graphs.trees = made
    found = checked(runner, tmp_path)
    assert not found.failed and record.TREE_GRAPHS not in found.passed and not made.count
    assert runner.draft_graphs.trees is None and runner.shape[0] is TREE


def test_an_engine_whose_like_died_in_its_check_drafts_chains_without_our_kernels(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = module.key_of(runner)
    for start in ("one", "two"):
        (tmp_path / f"{key}.any.{start}.1.pending").write_text("trees\nFatal Python error: Segmentation fault\n")
    runner.draft_graphs.trees = object()
    monkeypatch.setattr(module, "check_verify", _raises)
    monkeypatch.setattr(module, "CheckRequests", _raises)
    found = SelfCheck(runner, Record(key, tmp_path), is_wanted=True)
    found.look_back()
    assert runner.shape[0] is CHAIN and not runner.verifier.has_kernel
    found.run()
    assert list(found.failed) == [record.CRASH] and "in the part `trees`" in found.failed[record.CRASH]
    assert runner.draft_graphs.trees is None and runner.shape[0] is CHAIN
    # until somebody asks for another check
    Record(key, tmp_path).clear()
    assert not Record(key, tmp_path).crash()


@pytest.mark.parametrize("has_kernel", [True, False], ids=["our verifier", "stock's"])
def test_chains_after_a_failed_check_are_drafted_and_yield_plain_decodings_tokens(
    ours: Engine, runner: Any, has_kernel: bool
) -> None:
    from vllm import SamplingParams

    runner.verifier.has_kernel = has_kernel
    module.limit(runner, CHAIN, "a test says so")
    prompts = [{"prompt_token_ids": [5, 6, 7, 8] * 5}, {"prompt_token_ids": [9, 3] * 8}]
    params = [SamplingParams(max_tokens=40, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 1.0)]
    plain = [
        SamplingParams(
            max_tokens=40, temperature=t, seed=3, ignore_eos=True, extra_args={"spec_rollout": {"enabled": False}}
        )
        for t in (0.0, 1.0)
    ]
    wanted = [out.outputs[0].token_ids for out in ours.llm.generate(prompts, plain, use_tqdm=False)]
    ours.llm.collective_rpc("spec_rollout_stats", args=(True,))
    got = [out.outputs[0].token_ids for out in ours.llm.generate(prompts, params, use_tqdm=False)]
    stats = ours.llm.collective_rpc("spec_rollout_stats", args=(True,))[0]
    assert got == wanted and stats["accepted"] > 0 and stats["branches_committed"] == 0
