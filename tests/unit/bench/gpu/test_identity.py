"""Differences from stock, and which of them are ties."""

from bench.gpu import identity
from bench.runner.runs import Run


class Stock:
    """An engine that takes either of two tokens once its logit is raised by what they are apart."""

    def __init__(self, candidates, apart, logit=1.0):
        self._candidates, self._apart, self._logit, self.calls = candidates, apart, logit, []

    def ask(self, operation, prompts=(), params=(), is_warm=False, **asked):
        if operation == "look":
            return {"logits": [self._logit] * len(asked["candidates"])}
        assert operation == "generate" and is_warm
        self.calls.append(prompts)
        chosen = []
        for values in params:
            ((token, bias),) = values["logit_bias"].items()
            assert values["max_tokens"] == 1 and "extra_args" not in values
            takes = token in self._candidates and bias >= self._apart
            chosen.append([token if takes else self._candidates[0]])
        return {"token_ids": chosen, "finish_s": [1.0] * len(chosen), "step_s": [1.0]}


def run(*token_ids):
    return Run(token_ids=tuple(token_ids), finish_s=(1.0,) * len(token_ids), step_s=(0.5, 1.0))


PROMPTS, PARAMS = [[9], [8]], [{"seed": 0, "extra_args": {"drafts": 1}}, {"seed": 1}]


def verdict(stock, wanted, found):
    return identity.prove(stock, PROMPTS, PARAMS, wanted, identity.compare(wanted, found))


def test_equal_outputs_are_compared_to_their_ends():
    same = identity.compare(run((1, 2, 3), (4, 5)), run((1, 2, 3), (4, 5)))
    assert (same.compared, same.partings, same.unproven) == (5, (), 0)


def test_a_difference_is_a_tie_only_if_stock_takes_both_tokens_within_the_tolerance():
    wanted, found = run((1, 2, 3), (4, 5, 6)), run((1, 7, 8), (4, 5, 6))
    tie = verdict(Stock([2, 7], 0.04), wanted, found)
    assert (tie.compared, tie.ties, tie.unproven, tie.partings[0].gap) == (4, 1, 0, 0.05)
    near = verdict(Stock([2, 7], 0.15), wanted, found)
    assert (near.ties, near.unproven, near.partings[0].gap) == (0, 1, 0.2)
    large = verdict(Stock([2, 7], 0.15, logit=-20.0), wanted, found)
    assert (large.ties, large.partings[0].allowed) == (1, 0.5)
    wrong = verdict(Stock([2, 3], 0.0), wanted, found)
    assert (wrong.ties, wrong.unproven, wrong.partings[0].gap) == (0, 1, None)


def test_stock_is_asked_about_all_differences_at_once_on_their_common_prefixes():
    stock = Stock([2, 7], 0.0)
    proven = verdict(stock, run((1, 2), (2,)), run((1, 7), (7,)))
    assert (proven.ties, proven.asked) == (2, 2)
    assert stock.calls == [[[9, 1], [8]]] * 2


def test_only_a_sample_is_asked_about_and_the_rest_counts_as_unproven():
    wanted, found = run((2,), (2,)), run((7,), (7,))
    parted = identity.compare(wanted, found)
    proven = identity.prove(Stock([2, 7], 0.0), PROMPTS, PARAMS, wanted, parted, sample=1)
    assert (proven.asked, proven.ties, proven.unproven) == (1, 1, 1)


def test_an_output_of_another_length_is_never_a_tie():
    found = verdict(Stock([2, 7], 0.0), run((1, 2, 3)), run((1, 2)))
    assert (found.compared, found.ties, found.unproven, found.asked) == (2, 0, 1, 0)
    assert (found.partings[0].stock, found.partings[0].ours) == (3, None)
