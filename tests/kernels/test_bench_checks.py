"""The kernel benchmark's checks pass the kernels, and would not pass wrong ones."""

import io
import json
from dataclasses import asdict

import pytest
from rich.console import Console

from bench.gpu import show
from bench.kernels import attention, shapes, verdict
from bench.kernels.timing import Time


@pytest.fixture(scope="module")
def kernels():
    tree_attention, reason = attention.load()
    assert reason is None
    tree_verify, commit, notes = verdict.load()
    assert notes == []
    return tree_attention, tree_verify, commit


@pytest.mark.slow
def test_the_kernels_pass(kernels, device):
    assert attention.check(kernels[0], device.type) is None
    assert verdict.check_verify(kernels[1], device.type) is None
    assert verdict.check_commit(kernels[2], device.type) is None


def test_attention_that_ignores_the_tree_is_found_out(kernels, device):
    def causal(*arguments, **options):
        ancestors = arguments[-1].clone()
        ancestors[1::2] = 1
        kernels[0](*arguments[:-1], ancestors, **options)

    assert "off by" in attention.check(causal, device.type)


def test_a_commit_that_moves_nothing_is_found_out(kernels, device):
    class Idle:
        CacheTable = kernels[2].CacheTable

        @staticmethod
        def kv_commit(*_):
            """Moves nothing."""

    assert "differ" in verdict.check_commit(Idle, device.type)


class Watch:
    """In place of the timer: every call is made once, and takes as long as the test says."""

    def time(self, call):
        call()
        return Time.of([1.0, 2.0, 3.0])


@pytest.fixture
def small(monkeypatch):
    """One shape of each kind."""
    cache = shapes.Cache(shapes.MODELS[1], 40, 2)
    monkeypatch.setattr(attention, "caches", lambda _: [cache])
    monkeypatch.setattr(attention, "attentions", lambda *_: [shapes.Attention(cache, 7, k) for k in ("chain", "tree")])
    monkeypatch.setattr(verdict, "verdicts", lambda _: [shapes.Verdict(shapes.MODELS[1], 1, 3)])


@pytest.mark.slow
def test_what_is_measured_ends_in_a_table_and_in_json(kernels, device, small):
    titles = []
    rows = list(attention.measure(Watch(), 1e12, True, titles.append, device.type))
    steps = list(verdict.measure(Watch(), 1e12, True, titles.append, device.type))
    assert len(titles) == 3
    assert [row.ours.median_us for row in rows] == [2.0, 2.0]
    assert steps[0].verify is not None and steps[0].commit is not None
    out = Console(file=io.StringIO(), width=160)
    show.attention_table(out, rows)
    show.verdict_table(out, steps)
    assert "0.5B tree 7" in out.file.getvalue()
    assert json.loads(json.dumps([asdict(row) for row in (*rows, *steps)]))


def test_a_kernel_that_is_wrong_is_not_timed(kernels, device, small, monkeypatch):
    monkeypatch.setattr(attention, "load", lambda: (lambda *arguments, **_: arguments[3].zero_(), None))
    rows = list(attention.measure(Watch(), 1e12, True, lambda _: None, device.type))
    assert [row.ours for row in rows] == [None, None]
    assert all("is wrong, so it is not timed" in row.notes[0] for row in rows)
    assert all(row.of_roof is row.over_fa3 is None for row in rows)
