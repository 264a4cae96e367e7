"""What the history index predicts, against what recorded answers then do. The doubts were fitted on other problems."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from vllm_specrollout.bench.grpo.trace import read_rollouts
from vllm_specrollout.bench.index.data import Epoch, RecordedProblem, recorded

from vllm_specrollout import _core
from vllm_specrollout.config.drafters import MAX_MATCHES, HistoryConfig
from vllm_specrollout.history.index_cache import weight_of

# the first half of the problems, one epoch earlier, is what DOUBT in tests/reference/history.py was fitted on
HELD_OUT = recorded(past=2).problems[32:]
PRESENT = 2
LEAST = 500
# rollouts of six epochs of GRPO on the benchmarks' policy, stock vLLM's answers: `specrollout bench grpo --trace`
GRPO = Path(__file__).parents[1] / "traces" / "grpo"


def build(problem: RecordedProblem, c: HistoryConfig) -> _core.HistoryIndex:
    index = _core.HistoryIndex(min_match=c.min_match, max_match=c.max_match, max_matches=MAX_MATCHES)
    index.set_prompt(problem.prompt)
    for number, epoch in enumerate(problem.past):
        for answer, reward in zip(epoch.answers, epoch.rewards, strict=True):
            index.add(answer, weight_of(c, PRESENT - number, reward), number)
    return index


def walk(tokens: list[int], parents: list[int], answer: list[int]) -> list[tuple[int, bool]]:
    """(node, whether it is accepted) of all nodes whose parent is accepted."""
    judged: list[tuple[int, bool]] = []
    parent = -1
    for wanted in answer:
        children = [node for node, its_parent in enumerate(parents) if its_parent == parent]
        judged += [(node, tokens[node] == wanted) for node in children]
        right = [node for node in children if tokens[node] == wanted]
        if not right:
            break
        parent = right[0]
    return judged


def replay(
    problem: RecordedProblem, config: HistoryConfig, nodes: int, is_chain: bool
) -> tuple[list[tuple[float, bool]], int]:
    """(predicted, accepted) of the judged nodes, and the number of steps; the siblings run side by side."""
    index = build(problem, config)
    running = [(index.open(PRESENT), answer.tolist()) for answer in problem.present.answers]
    written = dict.fromkeys((doc for doc, _ in running), 0)
    judged: list[tuple[float, bool]] = []
    steps = 0
    while running:
        count = len(running)
        docs = [doc for doc, _ in running]
        bounds = ([nodes] * count, [nodes] * count, [is_chain] * count)
        node_start, tokens, parents, log_q = _core.propose_history([index] * count, docs, *bounds)
        for i, (doc, answer) in enumerate(running):
            part = slice(node_start[i], node_start[i + 1])
            found = walk(tokens[part].tolist(), parents[part].tolist(), answer[written[doc] :])
            judged += [(float(np.exp(log_q[part][node])), is_right) for node, is_right in found]
            end = min(written[doc] + sum(is_right for _, is_right in found) + 1, len(answer))
            index.append(doc, np.asarray(answer[written[doc] : end], np.int32))
            written[doc] = end
            steps += 1
        running = [(doc, answer) for doc, answer in running if written[doc] < len(answer)]
    return judged, steps


@pytest.mark.parametrize("min_match", [1, 2])
@pytest.mark.parametrize("nodes", [8, 32])
def test_predicted_and_observed_acceptance_agree_in_every_tenth_on_held_out_problems(nodes, min_match) -> None:
    config = HistoryConfig(min_match=min_match)
    judged = np.asarray([pair for problem in HELD_OUT for pair in replay(problem, config, nodes, False)[0]])
    assert tenths_that_agree(judged) == 10


def tenths_that_agree(judged: np.ndarray) -> int:
    """judged: [N, 2] predicted probability, 1.0 if accepted. How many tenths have enough nodes; all those agree."""
    tenth = np.minimum((judged[:, 0] * 10).astype(int), 9)
    checked = 0
    for number in range(10):
        predicted, observed = judged[tenth == number].T
        if len(predicted) > LEAST:
            checked += 1
            assert abs(predicted.mean() - observed.mean()) < 0.07, number
    return checked


def test_predictions_hold_from_epoch_to_epoch_while_a_policy_is_trained() -> None:
    """From the third epoch on, each epoch's answers are predicted from the two before it, whose weights were others."""
    answers: dict[str, dict[int, list]] = defaultdict(lambda: defaultdict(list))
    for one in read_rollouts(GRPO):
        answers[one["problem_id"]][one["epoch"]].append(one)
    judged = []
    for of_problem in answers.values():
        epochs = [
            Epoch(tuple(np.asarray(one["token_ids"], np.int32) for one in own), tuple(one["reward"] for one in own))
            for _, own in sorted(of_problem.items())
        ]
        prompt = np.asarray(of_problem[0][0]["prompt_token_ids"], np.int32)
        for now in range(PRESENT, len(epochs)):
            problem = RecordedProblem(prompt, tuple(epochs[now - PRESENT : now + 1]))
            judged += replay(problem, HistoryConfig(), 32, False)[0]
    assert tenths_that_agree(np.asarray(judged)) == 10


def test_a_tree_yields_more_tokens_per_step_than_a_chain_of_as_many_nodes() -> None:
    config = HistoryConfig(min_match=1)
    steps = {
        is_chain: sum(replay(problem, config, 32, is_chain)[1] for problem in HELD_OUT) for is_chain in (True, False)
    }
    assert steps[True] / steps[False] > 1.15
