"""Marks of requests: the front end's own, through every copy of the parameters, and nobody else's."""

from __future__ import annotations

import copy
import json
import pickle
from types import SimpleNamespace

import pytest

from vllm_specrollout.config.marking import KEY, RowsMark, check_mark, mark_of
from vllm_specrollout.errors import ConfigError

MARK = RowsMark(prompt_tokens=3, version=2)


@pytest.mark.parametrize("copied", [MARK, copy.deepcopy(MARK), copy.copy(MARK), pickle.loads(pickle.dumps(MARK))])
def test_a_mark_of_ours_passes_however_it_was_copied(copied: RowsMark) -> None:
    check_mark({KEY: copied})
    assert mark_of(SimpleNamespace(extra_args={KEY: copied})) == {"prompt_tokens": 3, "version": 2}


@pytest.mark.parametrize("written", [json.loads(json.dumps(MARK)), json.dumps(MARK), True, None])
def test_what_a_client_writes_is_refused(written: object) -> None:
    with pytest.raises(ConfigError) as error:
        check_mark({KEY: written})
    assert str(error.value) == "`spec_rollout_rows` in `extra_args` is the engine's own\n\nhint: leave it out"


def test_requests_without_a_mark_have_none() -> None:
    check_mark({"other": 1})
    assert [mark_of(one) for one in (None, SimpleNamespace(extra_args=None), SimpleNamespace(extra_args={}))] == [
        None
    ] * 3
