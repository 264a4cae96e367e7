"""What a GPU is measured with: how engines and requests are set up, and what is told of outputs that part."""

import json
from types import SimpleNamespace

import pytest

from bench.gpu import commands
from bench.gpu.commands import Options
from bench.kernels import shapes
from bench.kernels.shapes import Cell
from bench.runner import ties
from bench.runner.models import BARE, bare_model
from bench.runner.rows import Pair
from bench.runner.scenario import command
from bench.scenarios import device
from bench.scenarios.device import Device
from tests.unit.bench.runner.fake_engines import invoke
from vllm_specrollout.config import parse, parse_request
from vllm_specrollout.errors import ConfigError


@pytest.fixture(scope="module")
def every():
    """Every one of the hour's, of real and of dry walks, from its command's own words."""
    found = []
    for one in [*commands.jobs(Options()), *commands.jobs(Options(is_dry=True))]:
        if one.arguments[1] == "device":
            result = invoke(command(Device, found.append), *one.arguments[2:])
            assert result.exit_code == 0, result.output
    return found


def test_the_hours_words_are_those_of_the_scenario(every):
    assert len(every) > 6
    assert {one.is_strict for one in every} == {True, False}
    # what is timed is looked into as well
    assert all((one.rounds > 0) == (one.traced != (0,)) for one in every)
    assert all({cell.batch for cell in one.cells} & set(one.traced) for one in every if one.rounds)


def test_trees_are_timed_where_steps_draft_them(every):
    assert all(cell.batch <= 8 for one in every if "tree" in one.arms for cell in one.cells)


def test_a_row_has_the_nodes_of_its_cell_and_what_needs_none_has_one_row():
    cells = Cell.parse_all("8x64:7,1x64:1,3", "--cells")
    jobs = [(str(cell), arm, nodes) for cell, arm, nodes in Device(cells=cells, arms=("chain", "ngram")).jobs]
    assert jobs == [
        ("1x64", "chain", 1),
        ("1x64", "chain", 3),
        ("1x64", "ngram", 3),
        ("8x64", "chain", 7),
        ("8x64", "ngram", 7),
    ]


def test_our_engines_and_requests_are_configured_as_the_plugin_understands(every, tmp_path):
    for scenario in every:
        for shape in ("chain", "tree"):
            config = parse(scenario.spec_rollout(shape, tmp_path / "oracle.json"))
            assert (config.max_draft_tokens, config.shape) == (scenario.most_nodes, shape)
        bench, cell = device._Bench(scenario, None, tmp_path), scenario.cells[-1]
        options = [parse_request(one["extra_args"]["spec_rollout"]) for one in bench._params(cell, "tree", 3)]
        assert {one.max_draft_tokens for one in options} == {3}
        assert len({one.problem_id for one in options}) == cell.batch
        assert all("extra_args" not in one for one in bench._params(cell, "tree"))


def test_strict_engines_are_batch_invariant_where_there_is_a_gpu(every):
    for scenario in every:
        assert ("VLLM_BATCH_INVARIANT" in scenario.environment()) == (scenario.is_strict and not scenario.is_dry)


def test_the_kv_cache_holds_the_largest_cell_and_the_longest_request(every):
    for scenario in every:
        model = BARE[scenario.model]
        held = scenario.kv_bytes // (model.layers * model.token_bytes)
        assert all(held >= cell.batch * (cell.context + 1 + scenario.tokens) for cell in scenario.cells)


def test_graphs_are_captured_for_every_batch_with_none_and_with_all_of_its_nodes(every):
    for scenario in every:
        sizes = scenario.capture_sizes
        for cell in scenario.cells:
            assert all(cell.batch * (1 + n) in sizes for n in (0, *cell.nodes))
        assert sizes == sorted(set(sizes)) and len(sizes) <= 40


def test_a_cell_is_named_by_its_batch_and_its_context():
    assert Cell.parse("8x1024") == Cell(8, 1024) and str(Cell(8, 1024)) == "8x1024"
    assert Cell.parse_all("8x1024:0,15, 1x64", "--cells") == (Cell(8, 1024, (0, 15)), Cell(1, 64))
    for text in ("8", "x1024", "8x", "0x1024", "8x1000", "eightx64", "8x64:", "8x64:64", "8x64:7,"):
        with pytest.raises(ConfigError, match="--cells"):
            Cell.parse(text)


def test_ngram_prompts_repeat_themselves_and_others_do_not():
    cell = Cell(2, 256)
    (one, two), (other, _) = device._prompts(cell, 5000, "ngram"), device._prompts(cell, 5000, "tree")
    assert len(one) == len(other) == 257 and one != two
    assert len(set(one)) <= 32 < len(set(other))


def test_a_bare_model_has_the_shape_it_is_named_after(tmp_path):
    config = json.loads((bare_model("7B", tmp_path / "m") / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (3584, 28, 152064)
    assert shapes.MODELS["7B"].head_size * config["num_attention_heads"] == config["hidden_size"]


@pytest.fixture
def made(make_run, tmp_path, monkeypatch):
    """A row of two runs that part at one token; stock says whether that is a tie."""

    def make(is_tie, is_parted=True, **settings):
        monkeypatch.setattr(ties, "asked", lambda *_, **__: (is_tie, "level" if is_tie else "apart"))
        scenario = Device(cells=(Cell(1, 64),), rounds=1, tokens=4, **settings)
        stock = make_run([[1, 2, 3, 4]], [1.0, 2.0, 3.0, 4.0])
        ours = make_run([[1, 9, 9, 9] if is_parted else [1, 2, 3, 4]], [1.0, 2.0], steps=2, drafted=3, request_steps=2)
        bench = device._Bench(scenario, {"stock": SimpleNamespace()}, tmp_path)
        return bench._made(scenario.cells[0], "tree", 3, [Pair(stock=stock, ours=ours)])

    return make


def test_a_speed_is_told_of_stocks_tokens_and_behind_proven_ties(made):
    same, tie = made(False, is_parted=False), made(True)
    assert same.passed and same.identical and same.speedup == tie.speedup == 2.0
    assert tie.passed and not tie.identical and tie.is_proven and tie.compared == 1 and "level" in tie.ties[0]


def test_no_speed_is_told_of_a_difference_that_is_no_tie(made):
    wrong = made(False)
    assert wrong.passed is False and not wrong.is_proven and "apart" in wrong.differences[0]
    assert wrong.speedup is wrong.step_ms is wrong.makespan_s is None


def test_where_no_tie_is_allowed_a_proven_one_is_wrong(made):
    assert made(True, is_strict=True).passed is False and not made(True, is_strict=True).is_proven
