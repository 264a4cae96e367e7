"""The GPU measurements without a GPU: their plans, their checks, and the dry run, which measures nothing."""

import io
import json
import random
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from bench.common.rows import Pair, make_row
from bench.common.runs import Run
from bench.gpu import graphs, identity, models, plan, show
from bench.gpu.engines import Result, root_cause, split
from bench.gpu.run import run
from bench.kernels import shapes
from vllm_specrollout.config import parse, parse_request
from vllm_specrollout.errors import SpecRolloutError


def command(*arguments):
    app = typer.Typer()
    app.command()(run)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("quick", [[], ["--quick"]], ids=["full", "quick"])
def test_a_dry_run_builds_every_shape_and_prints_no_figure(tmp_path, quick):
    result = command("--out", tmp_path / "out", "--dry-run", *quick)
    assert result.exit_code == 0, result.exception
    assert "nothing was measured" in result.stdout
    assert "GiB (estimate)" in result.stdout
    for unit in (" us", "speed-up", "TB/s", "identical"):
        assert unit not in result.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--parts", "kernels,memory"], "`--parts` is 'memory', which does not exist"),
        (["--models", "70B"], "`--models` is '70B', which does not exist"),
        (["--budget", "all"], "`--budget` is 'all', which does not exist"),
    ],
)
def test_bad_flags_are_one_clear_error(tmp_path, arguments, cause):
    error = command("--out", tmp_path, "--dry-run", *arguments).exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause == cause


def test_without_a_gpu_nothing_but_the_dry_run_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    error = command("--out", tmp_path).exception
    assert isinstance(error, SpecRolloutError)
    assert error.cause == "no CUDA GPU can be used: torch finds none"


@pytest.mark.parametrize("tau", plan.DRAFTS)
def test_recordings_are_right_as_often_as_the_wanted_tokens_per_step_need(tau):
    answer = [random.Random(0).randrange(1000) for _ in range(40_000)]
    recorded = plan.recording(answer, tau, "key", 1000)
    at, steps = 0, 0
    while at < len(answer) - plan.DRAFTS[tau] - 1:
        right = [recorded[at + i] == answer[at + i] for i in range(plan.DRAFTS[tau])]
        at += 1 + (right.index(False) if False in right else len(right))
        steps += 1
    assert at / steps == pytest.approx(tau, rel=0.03)


def test_our_engines_and_requests_are_configured_as_the_plugin_understands():
    (made,) = plan.plans(["0.5B"], False, "fixed")
    config = parse(made.spec_rollout("oracle.json"))
    assert config.max_draft_tokens == 15
    for cell in made.cells:
        for tau in made.taus:
            values = plan.params(made, cell, tau)
            options = [parse_request(one["extra_args"]["spec_rollout"]) for one in values]
            assert {one.max_draft_tokens for one in options} == {plan.DRAFTS[tau]}
            assert len({one.problem_id for one in options}) == cell.batch
    for arm in graphs.arms():
        assert (parse(arm.spec_rollout) is None) == (arm.name == "stock")


def test_the_kv_cache_holds_the_largest_cell_and_the_longest_request():
    for made in plan.plans(["7B", "0.5B"], False, "fixed"):
        config = models.CONFIGS[made.model]
        held = made.kv_bytes // config.kv_token_bytes
        assert all(held >= cell.batch * (cell.context + 1 + made.tokens) for cell in made.cells)
        assert made.max_model_len <= config.max_position_embeddings


def test_the_7b_shape_has_the_size_it_is_named_after(tmp_path):
    assert models.CONFIGS["7B"].weight_bytes / 2e9 == pytest.approx(7.6, abs=0.1)
    written = json.loads((models.write("7B", tmp_path) / "config.json").read_text())
    assert (written["hidden_size"], written["num_hidden_layers"], written["vocab_size"]) == (3584, 28, 152064)


def test_a_chain_sees_what_stands_before_it_and_a_tree_its_ancestors():
    assert shapes.ancestor_words(3, "chain") == [0, 0b1, 0b11, 0b111]
    assert shapes.ancestor_words(5, "tree") == [0, 0b1, 0b11, 0b101, 0b1011, 0b10011]
    assert shapes.ancestor_words(64, "chain")[-1] == -1


class Stock:
    """An engine that takes `level` tokens at equal logits, once one of them is raised."""

    def __init__(self, level):
        self.level = level

    def ask(self, operation, prompts, params, is_warm):
        (token,) = params[0]["logit_bias"]
        assert params[0]["max_tokens"] == 1 and "extra_args" not in params[0]
        chosen = token if token in self.level else self.level[0]
        return {"token_ids": [[chosen]], "finish_s": [1.0], "step_s": [1.0]}


def one_run(*token_ids):
    return Run(token_ids=tuple(token_ids), finish_s=(1.0,) * len(token_ids), step_s=(0.5, 1.0))


def test_a_difference_counts_as_a_tie_only_if_stock_takes_both_tokens():
    wanted, found = one_run((1, 2, 3), (4, 5, 6)), one_run((1, 7, 8), (4, 5, 6))
    prompts, params = [[9], [9]], [{"seed": 0}, {"seed": 1}]
    tie = identity.compare(Stock([2, 7]), prompts, params, wanted, found)
    assert (tie.ties, tie.compared, tie.ours.token_ids) == (1, 4, wanted.token_ids)
    wrong = identity.compare(Stock([2, 3]), prompts, params, wanted, found)
    assert (wrong.ties, wrong.ours.token_ids) == (0, found.token_ids)


def test_an_output_of_another_length_is_never_a_tie():
    verdict = identity.compare(Stock([2, 7]), [[9]], [{"seed": 0}], one_run((1, 2, 3)), one_run((1, 7)))
    assert verdict.ties == 0


def test_the_workers_totals_are_told_per_step():
    assert split({"steps": 4, "draft_ms": 2.0, "by_rows": {}, "shape": "tree"}) == {"steps": 4, "draft_ms": 0.5}
    assert split({"steps": 0}) == {}


def test_an_engine_that_does_not_start_is_left_out_for_the_reason_it_gave():
    told = "the ngram engine failed: RuntimeError: failed. See root cause above.\n  ValueError: no such method\n  at x"
    assert root_cause(SpecRolloutError(told, "")) == "ValueError: no such method"
    assert root_cause(SpecRolloutError("it stopped", "")) == "it stopped"


def test_a_time_that_was_not_measured_is_a_dash():
    assert show.time(None) == show.number(None) == "-"
    assert show.time(SimpleNamespace(median_us=10.0, low_us=9.0, high_us=13.0)) == "10.0 ±2.0"


def test_outputs_that_differ_have_no_speed_and_rivals_are_not_called_identical(make_run):
    slow, fast, wrong = (
        make_run([[1, 2]], [2.0, 4.0]),
        make_run([[1, 2]], [0.5, 1.0]),
        make_run([[1, 3]], [0.5, 1.0]),
    )
    results = [
        Result(model="7B", context=1024, row=make_row(name, 1, 7, [Pair(stock=slow, ours=run)]), **found)
        for name, run, found in (
            ("ours", fast, {"compared": 2, "ties": 0, "split": {"steps": 2, "draft_ms": 0.5}}),
            ("broken", wrong, {"compared": 1, "ties": 0}),
            ("rival", fast, {}),
        )
    ]
    out = Console(file=io.StringIO(), width=160)
    show.engine_table(out, results)
    text = out.file.getvalue()
    # whole and decode only, of the two that may be told
    assert text.count("4.00x") == 4
    assert "NO" in text and "request 0, token 1: stock 2, ours 3" in text
    assert "not compared" in text and "draft_ms" in text
    assert [result.as_dict()["row"]["identical"] for result in results] == [True, False, None]
    assert results[1].as_dict()["row"]["speedup"] is None


def test_graph_memory_is_told_as_a_difference_beside_its_estimate():
    row = graphs.Row(name="ours", device_mib=900.0, graphs_mib=300.0, logged_mib=None, estimated_mib=250.0)
    out = Console(file=io.StringIO(), width=160)
    show.graph_table(out, [row], "7B")
    assert "300" in out.file.getvalue() and "250" in out.file.getvalue()
