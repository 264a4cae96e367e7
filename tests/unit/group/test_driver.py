"""What a group refuses before it begins a process, and how it shares cores out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_specrollout.cli import app
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.group import RolloutGroup
from vllm_specrollout.group.messages import Run, decode, encode
from vllm_specrollout.group.processes import shares_of

HERE = Path(__file__).parents[1]


def bare() -> Any:
    """A group without processes."""
    group = RolloutGroup.__new__(RolloutGroup)
    import random

    group._rng, group._batches = random.Random(0), 0
    return group


def test_every_refusal_reads_as_recorded(snapshot: Any, render_refusals: Any) -> None:
    group = bare()
    cases = {
        "a ladder that does not exist": lambda: RolloutGroup("m", ladder="climb"),
        "no drafter to attach": lambda: RolloutGroup("m", ladder="attach"),
        "a drafter that nobody attaches": lambda: RolloutGroup("m", drafter="d"),
        "drafters without a name": lambda: RolloutGroup("m", ladder="attach", drafter=["d", ""]),
        "plain": lambda: RolloutGroup("m", spec_rollout=False),
        "no cores": lambda: RolloutGroup("m", cores=[[0], []]),
        "no method": lambda: RolloutGroup("m", ladder="race", methods=()),
        "several answers at once": lambda: group._asks([[1]], {"n": 2}),
        "the likeliest tokens": lambda: group._asks([[1]], {"logprobs": 5}),
        "a token id below all": lambda: group._asks([[1], [2, -1]], {}),
        "a token id above all": lambda: group._asks([[1 << 31]], {}),
        "no token id": lambda: group._asks([[1, 2.5]], {}),
        "no list of token ids": lambda: group._asks([3], {}),
        "one for each": lambda: group._asks([[1]], [{}, {}]),
        "an object": lambda: group._asks([[1]], [3]),
        "no JSON": lambda: group._asks([[1]], {"extra_args": {"a": object}}),
    }
    snapshot(HERE / "refusals" / "group.txt", render_refusals(cases))


def test_what_counts_as_a_whole_number_is_told_as_one() -> None:
    (ask,) = bare()._asks([np.array([3, (1 << 31) - 1])], {})
    assert decode(encode(Run(ask.request, ask.prompt, ask.params))) == Run("1-0", (3, (1 << 31) - 1), ask.params)


def test_whoever_samples_gets_a_seed_and_keeps_its_own() -> None:
    asks = bare()._asks([[1], [2], [3]], [{}, {"seed": 5}, {"temperature": 0.0}])
    assert isinstance(asks[0].params["seed"], int)
    assert asks[1].params["seed"] == 5 and "seed" not in asks[2].params
    assert [ask.request for ask in asks] == ["1-0", "1-1", "1-2"]


def test_cores_are_shared_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 4, 5, 6, 7})
    assert shares_of(2) == [[3, 4, 5], [6, 7]]
    assert shares_of([[0], [1, 2]]) == [[0], [1, 2]]
    with pytest.raises(ConfigError, match="`cores` is 6"):
        shares_of(6)


def test_the_command_refuses_an_address_off_the_host() -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["coordinator", "--listen", "tcp://127.0.0.1:1"])
    assert isinstance(result.exception, ConfigError) and "one host" in str(result.exception)
