"""Random schedules of what trainers do, without an engine: whose answer each is, of which policy, of which epoch."""

import dataclasses
import random
from dataclasses import dataclass, field

import numpy as np

from tests.unit.history.stored import answers_in
from tests.unit.history.texts_device import Later
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.history.index_cache import IndexCache
from vllm_specrollout.history.problems import Attribution, Problems, prompt_hash
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer, FinishReason, RequestView

SCHEDULES = 200
PASSES = 3


@dataclass
class Sample:
    """One answer that the trainer wants."""

    prompt: list[int]
    length: int
    tokens: list[int] = field(default_factory=list)
    name: str | None = None
    view: RequestView | None = None
    # of the request that runs: what it has answered so far
    answer: list[int] = field(default_factory=list)


class Engine:
    """Requests without a model: every token is a new one. It does what scheduler and worker do with a request."""

    def __init__(self, chance: random.Random) -> None:
        config = HistoryConfig(epochs=PASSES + 1)
        self.store = HistoryStore(config)
        # builds no index: nothing is drafted here
        cache = IndexCache(config, self.store, lambda: None, Later())
        self.drafter = HistoryDrafter(config, store=self.store, cache=cache)
        self.problems, self.version, self.last, self._count = Problems(), 0, "", 0
        self._chance, self._token = chance, 1000
        # by request: what must be kept of it
        self.wanted: dict[str, tuple[str, int, int]] = {}

    def ask(self, sample: Sample, number: int) -> None:
        self._count += 1
        sample.name, sample.answer = f"r{self._count}", []
        prompt = [*sample.prompt, *sample.tokens]
        found = self.problems.arrive(sample.name, prompt, sample.answer)
        assert found == Attribution(prompt_hash(sample.prompt), continues=sample.view is not None)
        known = {"name": sample.name, "weights_version": self.version, **dataclasses.asdict(found)}
        sample.view = RequestView(sample.name, np.asarray(prompt, np.int32), len(prompt), 100, **known)
        self.drafter.admit(sample.view)
        self.last = found.problem_id
        self.wanted[sample.name] = (found.problem_id, number, self.version)

    def step(self, sample: Sample) -> bool:
        """Some tokens; whether the answer is complete."""
        assert sample.name is not None
        for _ in range(self._chance.randrange(1, 5)):
            self._token += 1
            sample.answer.append(self._token)
        problem, number, _ = self.wanted[sample.name]
        self.wanted[sample.name] = (problem, number, self.version)
        is_done = len(sample.tokens) + len(sample.answer) >= sample.length
        if is_done:
            self.end(sample, FinishReason.FINISHED)
        return is_done

    def end(self, sample: Sample, status: FinishReason) -> None:
        name, view = sample.name, sample.view
        assert name is not None and view is not None
        self.problems.end(name)
        if sample.answer:
            problem, _, version = self.wanted[name]
            tokens = np.asarray(sample.answer, np.int32)
            self.drafter.finish(Answer(name, view.problem_id, view.token_ids, tokens, status, version, name))
        else:
            del self.wanted[name]
            self.store.ended(name)
        self.drafter.forget(name)
        # the client may have seen fewer tokens than the engine has made, but some
        sample.tokens += sample.answer[: max(len(sample.answer) - self._chance.randrange(3), 1)]
        sample.name = None


def carry_out(seed: int) -> tuple[int, int]:
    """How many requests went on from others, and how many policies there were."""
    chance = random.Random(seed)
    engine, num_again = Engine(chance), 0
    prompts = [[chance.randrange(900) for _ in range(chance.randrange(3, 9))] for _ in range(chance.randrange(3, 6))]
    for number in range(PASSES):
        # a problem that was asked last and comes at once cannot be told from one more sample of its
        chance.shuffle(prompts)
        prompts.sort(key=lambda prompt: prompt_hash(prompt) == engine.last)
        left = [Sample(prompt, chance.randrange(2, 30)) for prompt in prompts for _ in range(3)]
        for sample in left:
            engine.ask(sample, number)
        while left:
            act = chance.random()
            if act < 0.04:
                engine.version += 1
            for sample in list(left):
                if sample.name is None:
                    if chance.random() < 0.5:
                        engine.ask(sample, number)
                        num_again += 1
                elif act < 0.03 or chance.random() < 0.05:
                    engine.end(sample, FinishReason.ABORTED)
                elif engine.step(sample):
                    left.remove(sample)
        engine.version += 1
    kept = {
        answer.request_id: (answer.problem_id, answer.epoch, answer.weights_version)
        for prompt in prompts
        for answer in answers_in(engine.store, prompt_hash(prompt))
    }
    assert kept == engine.wanted, f"schedule {seed}"
    return num_again, engine.version


def test_whatever_is_interrupted_and_pushed_answers_are_kept_under_their_problem_policy_and_epoch() -> None:
    found = [carry_out(seed) for seed in range(SCHEDULES)]
    assert sum(again for again, _ in found) > 10 * SCHEDULES
    assert sum(version for _, version in found) > (PASSES + 1) * SCHEDULES
