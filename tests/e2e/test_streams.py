"""An engine that drafts for another one: its trees are those of the tokens that hold, whatever held before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams

from tests.e2e.identity.engines import engine, model
from vllm_specrollout.cluster.counter import HASHES, TAPE, NoiseKind
from vllm_specrollout.cluster.messages import Close, Drafts, Noise, Open, Verdict
from vllm_specrollout.worker.streams.engine import StreamEngine
from vllm_specrollout.worker.streams.runner import choices_of
from vllm_specrollout.worker.streams.scheduler import Follow, StreamStep

PROMPT = [9, 40, 41, 42, 17, 5]
# what a request with seed 3 draws on CPU
SEEDS = torch.randint(0, 2**31, (400,), generator=torch.Generator().manual_seed(3), dtype=torch.long).numpy()
MOST = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model(tmp_path_factory.mktemp("models"), "llama", "float32")


@pytest.fixture(scope="module")
def sampled(target: str) -> list[int]:
    """What stock vLLM samples."""
    with engine(target, "float32", is_ours=False) as stock:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
        (output,) = stock.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def streams(target: str, sampled: list[int]) -> Iterator[StreamEngine]:
    # `sampled` comes first: the end of its engine would take this one's process groups along
    own = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "enforce_eager": True}
    engine = StreamEngine(target, 16, {**own, "kv_cache_memory_bytes": 1 << 26})
    # plain coupling: a copy of the target then draws the target's own tokens
    engine.scheduler.sharpness.pinned = engine.scheduler.second_sharpness.pinned = 1.0
    yield engine
    engine.shutdown()


def opened(handle: int, tokens: list[int], *, window: int = 4, fan_out: int = 2, temperature: float = 1.0) -> Open:
    drawn = max(len(tokens) - len(PROMPT), 0)
    seeds = SEEDS[drawn : drawn + 3 * window] if temperature else SEEDS[:0]
    own = np.asarray(tokens, np.int32)
    return Open(handle, 0, own, seeds, temperature, 0, 1.0, 0.0, 200, window, fan_out)


def verdict(handle: int, tokens: list[int], new: int, window: int = 4) -> Verdict:
    drawn = len(tokens) - len(PROMPT)
    seeds = SEEDS[drawn : drawn + 3 * window]
    return Verdict(handle, 0, len(tokens), np.asarray(tokens[-new:], np.int32), seeds, len(tokens), window, 2)


def drafted(engine: StreamEngine, handle: int) -> Drafts:
    """The stream's tree, once there is nothing left to look behind."""
    found = {}
    while True:
        found |= {drafts.handle: drafts for drafts in engine.step()}
        if not engine.may_draft:
            return found[handle]


def chain(drafts: Drafts) -> list[int]:
    tokens, node = [], -1
    while len(below := np.flatnonzero(drafts.parents == node)):
        node = int(below[0])
        tokens.append(int(drafts.token_ids[node]))
    return tokens


def test_a_copy_of_the_target_draws_the_targets_tokens(streams: StreamEngine, sampled: list[int]) -> None:
    streams.take(opened(1, PROMPT, fan_out=1))
    assert chain(drafted(streams, 1)) == sampled[:8]
    tokens = PROMPT + sampled[:5]
    streams.take(verdict(1, tokens, 5))
    assert chain(drafted(streams, 1)) == sampled[5:13]
    streams.take(Close(1))


@pytest.mark.parametrize("seed", range(4))
def test_after_any_verdicts_a_tree_is_that_of_a_fresh_stream(streams: StreamEngine, seed: int) -> None:
    """Keys and values of what was only drafted leave no trace."""
    rng = np.random.default_rng(seed)
    tokens = list(PROMPT)
    streams.take(opened(2, tokens))
    drafts = drafted(streams, 2)
    for _ in range(12):
        follows = chain(drafts)[: int(rng.integers(0, 9))]
        new = [*follows, int(rng.integers(3, 300))]
        tokens += new
        streams.take(verdict(2, tokens, len(new)))
        for _ in range(int(rng.integers(0, 3))):
            streams.step()
        if rng.random() < 0.5:
            continue  # the next verdict comes before it has drafted all
        drafts = drafted(streams, 2) if streams.may_draft else drafts
    tokens.append(7)
    streams.take(verdict(2, tokens, 1))
    grown = drafted(streams, 2)
    streams.take(opened(3, tokens))
    fresh = drafted(streams, 3)
    assert grown.position == fresh.position == len(tokens)
    assert chain(grown) == chain(fresh)
    streams.take(Close(2))
    streams.take(Close(3))
    assert not streams.scheduler.streams and not streams.scheduler.requests


def test_verdicts_that_come_before_the_first_pass_are_part_of_what_a_stream_follows(
    streams: StreamEngine, sampled: list[int]
) -> None:
    streams.take(opened(10, PROMPT, fan_out=1))
    for count in (1, 2, 3):
        streams.take(verdict(10, PROMPT + sampled[:count], 1))
    assert chain(drafted(streams, 10)) == sampled[3:11]
    streams.take(verdict(10, PROMPT + sampled[:5], 2))
    assert chain(drafted(streams, 10)) == sampled[5:13]
    streams.take(Close(10))
    assert not streams.scheduler.requests


def test_more_streams_than_there_are_places_draft_as_if_the_last_ones_were_not_there(streams: StreamEngine) -> None:
    for handle in range(20, 30):
        streams.take(opened(handle, [*PROMPT, handle]))
    assert len(streams.scheduler.streams) == streams.max_requests == 8
    drafted(streams, 20)
    for handle in range(20, 30):
        streams.take(verdict(handle, [*PROMPT, handle, 7], 1))
    # all of them at once
    drafted(streams, 20)
    streams.close_all()
    assert not streams.scheduler.requests


def test_streams_of_several_requests_do_not_touch_each_other(streams: StreamEngine, sampled: list[int]) -> None:
    streams.take(opened(4, PROMPT, fan_out=1))
    streams.take(opened(5, [*PROMPT, 50, 51, 52], temperature=0.0))
    streams.take(opened(6, [8, 8, 8], fan_out=3))
    assert chain(drafted(streams, 4)) == sampled[:8]
    streams.take(Close(5))
    tokens = PROMPT + sampled[:3]
    streams.take(verdict(4, tokens, 3))
    assert chain(drafted(streams, 4)) == sampled[3:11]
    streams.close_all()
    assert not streams.may_draft


def test_a_verifier_that_names_no_noise_stops_no_drafter(streams: StreamEngine) -> None:
    nameless = opened(9, PROMPT, temperature=0.0)
    streams.take(replace(nameless, temperature=1.0))
    streams.step()
    streams.take(replace(verdict(9, [*PROMPT, 7], 1), first_seed=1 << 20))
    streams.step()
    assert not streams.may_draft
    streams.close_all()


def test_a_request_longer_than_the_drafter_can_see_is_left_alone(streams: StreamEngine) -> None:
    streams.take(opened(7, [5] * 300))
    assert not streams.scheduler.streams
    streams.take(opened(8, [5] * 254))
    drafted(streams, 8)
    streams.take(verdict(8, [5] * 260, 6))
    assert not streams.scheduler.streams


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize("vocab", [300, 5000])
def test_with_noise_that_is_counted_each_row_draws_what_vllms_v2_runner_would(name: str, vocab: int) -> None:
    """Over more tokens than noise is counted for as well: a tail so unlikely is never drawn here."""
    from vllm_specrollout.kernels.tree_verify.naive import sample_rows

    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator) * 4.0
    seeds, places, temperatures = [3, 3, 3, -5, None], [7, 8, 9, 7, 7], [0.7, 0.7, 0.7, 1.0, 1.0]
    follow = {
        str(i): Follow(temperatures[at], 0, 1.0, 0.0, seeds[at : at + count], places[at : at + count])
        for i, (at, count) in enumerate([(0, 3), (3, 1), (4, 1)])
    }
    step = StreamStep(follow=follow, fan_out=3, noise=NoiseKind(Noise.COUNTER, name), is_trial=True)
    found = choices_of(logits, list(follow), [3, 1, 1], step)
    left = logits / torch.tensor(temperatures)[:, None]
    log_q = left.log_softmax(dim=-1)
    index, own = [0, 1, 2, 3, 4], [0.7, 0.7, 0.7, 1.0, 0.0]
    for rank in range(3):
        wanted = sample_rows(left, index, own, [seed or 0 for seed in seeds], places, is_philox=name == "philox")
        assert [row.token_ids[rank] for row in found] == wanted
        np.testing.assert_allclose(
            [row.log_q[rank] for row in found], [float(log_q[i, token]) for i, token in enumerate(wanted)], atol=1e-4
        )
        left = left.scatter(1, torch.tensor(wanted)[:, None], float("-inf"))
    assert found[4].trial is None, "a greedy row teaches nothing"
    for row in found[:4]:
        assert row.trial is not None and row.trial[0] == row.trial[1] == row.token_ids[0], "plain coupling, here"


def test_an_engine_draws_with_the_noise_that_it_is_told_of(streams: StreamEngine) -> None:
    """Other seeds draw other tokens, the same one the same, and the best are taken where there is none."""
    chains = []
    streams.meet(NoiseKind(Noise.COUNTER, "murmur"))
    try:
        for seed in (5, 6, 5):
            own = replace(opened(31, PROMPT, fan_out=1), seeds=np.array([seed], np.int64), temperature=2.0)
            streams.take(own)
            chains.append(chain(drafted(streams, 31)))
            streams.take(Close(31))
        streams.take(opened(31, PROMPT, fan_out=1, temperature=0.0))
        greedy = chain(drafted(streams, 31))
    finally:
        streams.close_all()
        streams.meet(TAPE)
    assert chains[0] == chains[2] != chains[1] and len(greedy) == len(chains[0]) == 8
    streams.take(opened(31, PROMPT, fan_out=1, temperature=0.0))
    assert chain(drafted(streams, 31)) == greedy
    streams.close_all()
