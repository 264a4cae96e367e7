"""A vLLM engine that drafts, on the V1 runner: what it draws as resumed requests is what the target samples."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.check import VOCAB
from tests.e2e.identity.engines import engine, model
from tests.e2e.short_context import with_context
from vllm_specrollout.cluster.messages import (
    VERSION,
    DraftUpdate,
    Hello,
    Message,
    Opened,
    Rest,
    Sampling,
    VerifierUpdate,
    ints,
    longs,
)
from vllm_specrollout.cluster.serving import Serving
from vllm_specrollout.worker.drafter_engine import DrafterEngine

PROMPT = [5, 6, 7, 8, 9, 10, 11]
ARGS: dict[str, Any] = {
    "dtype": "float32",
    # the target's
    "max_model_len": 512,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 27,
}
LENGTH, CONTEXT = 60, 256


class Letters:
    """A post without a wire: what the engine says is put in, what it hears is kept."""

    def __init__(self) -> None:
        self.coming: list[tuple[bytes, Message]] = []
        self.sent: list[Message] = []

    def receive(self) -> Iterable[tuple[bytes, Message]]:
        coming, self.coming = self.coming, []
        return coming

    def send(self, engine: bytes, message: Message) -> bool:
        self.sent.append(message)
        return True

    def wait(self, timeout_s: float) -> bool:
        return False


class Desk:
    """One target engine's side: it opens requests, gives verdicts, and looks at the newest tree of each."""

    def __init__(self, serving: Serving, letters: Letters) -> None:
        self.serving, self.letters = serving, letters
        self.say(Hello(VERSION, serving._engine.vocab_size))
        self.fan_out = 1

    def say(self, message: Message) -> None:
        self.letters.coming.append((b"target", message))

    def tell(self, opened: tuple[Opened, ...] = (), closed: Iterable[int] = (), **new: Any) -> None:
        """`h1=[tokens]`: these are new of the request with handle 1."""
        handles = np.array([int(name[1:]) for name in new], np.int64)
        counts = np.array([len(tokens) for tokens in new.values()], np.int32)
        tokens = np.array([token for own in new.values() for token in own], np.int32)
        gone, own = np.array(list(closed), np.int64).tobytes(), (handles.tobytes(), counts.tobytes(), tokens.tobytes())
        self.say(VerifierUpdate(self.fan_out, opened, gone, *own, 4))

    def tree(self, handle: int, turns: int = 24) -> tuple[int, list[tuple[int, int, int, float]]]:
        """The newest within some turns: tokens before it, and (token, parent, rank, log_q) of each node."""
        self.letters.sent.clear()
        for _ in range(turns):
            self.serving.turn()
        found = (0, [])
        for message in self.letters.sent:
            if isinstance(message, DraftUpdate):
                starts = ints(message.node_start).tolist()
                for i, own in enumerate(longs(message.handles).tolist()):
                    if own == handle:
                        part = slice(starts[i], starts[i + 1])
                        columns = (
                            ints(message.token_ids),
                            ints(message.parents),
                            np.frombuffer(message.ranks, np.uint8),
                            np.frombuffer(message.log_q, "<f4"),
                        )
                        nodes = list(zip(*(column[part].tolist() for column in columns), strict=True))
                        found = int(ints(message.positions)[i]), nodes
        return found


def chain(nodes: list[tuple[int, int, int, float]]) -> list[int]:
    """First choices, from the root down."""
    found, at = [], -1
    while (node := next((i for i, own in enumerate(nodes) if own[1] == at and own[2] == 0), None)) is not None:
        found.append(nodes[node][0])
        at = node
    return found


def opened(handle: int, tokens: list[int], *, prompt_tokens: int = len(PROMPT), **how: Any) -> Opened:
    sampling = Sampling(**{"temperature": 1.0, "seed": 7, **how})
    return Opened(handle, np.array(tokens, np.int32).tobytes(), prompt_tokens, sampling, 100, 4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model(tmp_path_factory.mktemp("drafts"), "llama", "float32")


@pytest.fixture(scope="module")
def sampled(path: str) -> dict[str, list[int]]:
    """Stock vLLM's answers to the prompt, by how they are sampled."""
    from vllm import SamplingParams

    ways = {
        "plain": {"temperature": 1.0}, "cold": {"temperature": 0.7}, "greedy": {"temperature": 0.0},
        "cut": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    }  # fmt: skip
    params = [
        SamplingParams(seed=7, max_tokens=LENGTH, ignore_eos=True, detokenize=False, **way) for way in ways.values()
    ]
    with engine(path, "float32", is_ours=False) as stock:
        outputs = stock.llm.generate([{"prompt_token_ids": PROMPT}] * len(ways), params, use_tqdm=False)
    return {name: list(output.outputs[0].token_ids) for name, output in zip(ways, outputs, strict=True)}


@pytest.fixture(scope="module")
def made(path: str, sampled: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrafterEngine]:
    """Of a model whose context is shorter than the target's."""
    # `sampled` comes first: the end of its engine would take this one's process groups along
    short = tmp_path_factory.mktemp("short") / "draft"
    shutil.copytree(path, short)
    own = DrafterEngine(with_context(str(short), CONTEXT), ARGS)
    yield own
    own.shutdown()


@pytest.fixture
def desk(made: DrafterEngine) -> Iterator[Desk]:
    letters = Letters()
    serving = Serving(made, letters)
    yield Desk(serving, letters)
    serving._forget(b"target")
    assert not serving._asked and not made.llm.has_unfinished_requests(), "nothing is left"


@pytest.mark.parametrize("way", ["plain", "cold", "greedy", "cut"])
def test_every_window_of_a_perfect_drafter_is_the_targets(desk: Desk, sampled: dict[str, list[int]], way: str) -> None:
    answer = sampled[way]
    more = {
        "plain": {}, "cold": {"temperature": 0.7}, "greedy": {"temperature": 0.0, "seed": None},
        "cut": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    }[way]  # fmt: skip
    places = range(0, LENGTH - 8, 5)
    for handle, place in enumerate(places, 1):
        desk.tell((opened(handle, [*PROMPT, *answer[:place]], **more),))
        position, nodes = desk.tree(handle)
        assert position == len(PROMPT) + place and chain(nodes) == answer[place : place + 8]
        desk.tell(closed=[handle])


def test_a_request_beyond_the_drafters_own_context_is_left_out_and_others_are_not(desk: Desk) -> None:
    most = desk.serving._engine.most_tokens
    assert most == CONTEXT - 1
    long = [5 + i % 90 for i in range(most + 1)]
    for handle, length, is_drafted in ((1, most - 8, True), (2, most + 1, False), (3, most - 8, True)):
        desk.tell((opened(handle, long[:length], prompt_tokens=length),))
        assert bool(desk.tree(handle)[1]) is is_drafted
        desk.tell(closed=[handle])


def test_a_line_follows_the_target_wherever_it_goes(desk: Desk, sampled: dict[str, list[int]]) -> None:
    answer = sampled["plain"]
    desk.tell((opened(1, PROMPT),))
    desk.tree(1)
    for held in (3, 4, 12):
        desk.tell(h1=answer[held - (3 if held == 3 else 1 if held == 4 else 8) : held])
        position, nodes = desk.tree(1)
        assert position == len(PROMPT) + held and chain(nodes) == answer[held : held + 8]
    # it leaves what was drawn: an own token, whose continuation nobody else knows
    other = (answer[12] + 1) % VOCAB
    desk.tell(h1=[other])
    position, nodes = desk.tree(1)
    grown = chain(nodes)
    desk.tell((opened(2, [*PROMPT, *answer[:12], other]),))
    assert position == len(PROMPT) + 13 and chain(desk.tree(2)[1]) == grown and len(grown) == 8


def test_exits_are_drafted_behind_while_few_requests_run(desk: Desk, sampled: dict[str, list[int]]) -> None:
    desk.fan_out = 4
    desk.tell((opened(1, PROMPT, temperature=0.5),))
    _, nodes = desk.tree(1)
    parents_of_exits = {i for i, node in enumerate(nodes) if node[2] > 0}
    assert any(node[1] in parents_of_exits for node in nodes), "an exit has something behind it"
    assert all(node[3] <= 0.0 for node in nodes) and len(nodes) <= 64


def test_asleep_it_holds_its_weights_alone_and_awake_it_draws_as_before(
    desk: Desk, made: DrafterEngine, sampled: dict[str, list[int]]
) -> None:
    answer, process = sampled["plain"], psutil.Process()

    def is_drafted(handle: int) -> bool:
        desk.tell((opened(handle, [*PROMPT, *answer[:20]]),))
        return chain(desk.tree(handle)[1]) == answer[20:28]

    def full(worker: Any) -> int:
        for cache in worker.model_runner.kv_caches:
            cache.fill_(1)  # as many requests would
        # layers may share one
        storages = {
            cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in worker.model_runner.kv_caches
        }
        return sum(storage.nbytes() for storage in storages.values())

    assert is_drafted(1)
    (size,) = made.llm.collective_rpc(full)
    awake = process.memory_info().rss
    desk.say(Rest(True))
    desk.serving.turn()
    assert desk.letters.sent[-1] == Rest(True) and size > 100 << 20
    assert awake - process.memory_info().rss > 0.95 * size, "its KV cache is the kernel's again"
    assert not is_drafted(2), "it drafts for nobody"
    desk.say(Rest(False))
    desk.say(Hello(VERSION, made.vocab_size))
    assert is_drafted(3), "what it had cached is forgotten, and computed anew"
    desk.tell(closed=[3])


def test_more_requests_than_there_are_places_share_them_out(desk: Desk, made: DrafterEngine) -> None:
    desk.tell(tuple(opened(i, [*PROMPT, i]) for i in range(1, 13)))
    for _ in range(60):
        desk.serving.turn()
        assert len(desk.serving._asked) <= made.max_requests == 8
    told_of = {
        handle for message in desk.letters.sent if isinstance(message, DraftUpdate) for handle in longs(message.handles)
    }
    assert told_of == set(range(1, 13)), "all are drafted for, in turns"


def test_what_the_drafter_cannot_follow_goes_on_without_its_drafts(desk: Desk, made: DrafterEngine) -> None:
    desk.tell((opened(1, [5] * 300), opened(2, [*PROMPT, made.vocab_size]), opened(3, [5] * 254, prompt_tokens=254)))
    desk.tree(3)
    lines = desk.serving.targets[b"target"].lines
    assert set(lines) == {3}
    desk.tell(h3=[5] * 6)
    desk.tell(h7=[5])
    desk.tree(3)
    assert not lines


def test_an_engine_that_is_not_known_is_greeted_and_nothing_is_drafted_for_it(desk: Desk) -> None:
    desk.letters.sent.clear()
    desk.letters.coming.append((b"stranger", VerifierUpdate(4, (opened(1, PROMPT),), b"", b"", b"", b"", 4)))
    desk.serving.turn()
    assert not desk.serving.targets[b"stranger"].lines
    assert any(isinstance(message, Hello) for message in desk.letters.sent)
