"""Which rows the GPU measurements have, and how engines and requests are set up for them."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.gpu import parts, plan
from bench.gpu.parts import FIRST_HOUR, Options
from bench.gpu.plan import Cell
from bench.gpu.record import key_of
from bench.kernels import shapes
from tests.drafters import ask
from vllm_specrollout.config import parse, parse_request
from vllm_specrollout.config.drafters import OracleConfig
from vllm_specrollout.drafters.oracle import OracleDrafter
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import RequestView

EVERYTHING = {"work": Path("work"), "rivals": plan.RIVALS}


def scenes(**options):
    """Every part's scene, of real and of dry walks."""
    made = [part for dry in (False, True) for part in parts.parts(Options(**EVERYTHING, **options, is_dry=dry))]
    return [part.setup["scene"] for part in made if "scene" in part.setup]


def test_the_first_hour_has_six_steps_and_a_dry_walk_has_rows_of_every_kind_that_it_has():
    real, dry = (parts.parts(Options(work=Path("w"), is_dry=is_dry)) for is_dry in (False, True))
    assert list(dict.fromkeys(part.step for part in real)) == list(FIRST_HOUR)
    assert [(part.step, part.name, part.runner) for part in real] == [
        (part.step, part.name, part.runner) for part in dry
    ]
    for one, other in zip(real, dry, strict=True):
        kinds = [{(task.params["kind"], task.params.get("arm")) for task in part.tasks} for part in (one, other)]
        assert kinds[0] == kinds[1]


def test_no_two_rows_of_a_step_have_one_key():
    for is_dry in (False, True):
        made = parts.parts(Options(**EVERYTHING, steps=(*FIRST_HOUR,), is_dry=is_dry))
        keys = [key_of(part.step, task.params, {}) for part in made for task in part.tasks]
        assert len(keys) == len(set(keys))
        names = [(part.title, task.name) for part in made for task in part.tasks]
        assert len(names) == len(set(names))


def test_speed_rows_ask_for_no_proof_and_strict_identity_rows_are_chains_without_ties():
    made = {part.title: part for part in parts.parts(Options(work=Path("w")))}
    assert {task.params["kind"] for task in made["speed"].tasks} == {"engines", "speed", "profile"}
    assert {task.params.get("arm") for task in made["speed"].tasks} >= {"chain", "tree", "stock"}
    for step in ("eager", "graphs"):
        chains, trees = made[f"{step}, chains, batch-invariant"], made[f"{step}, trees"]
        assert chains.setup["scene"].environment()["VLLM_BATCH_INVARIANT"] == "1"
        assert "VLLM_BATCH_INVARIANT" not in trees.setup["scene"].environment()
        assert all(task.params["is_strict"] for task in chains.tasks[1:])
        assert not any(task.params["is_strict"] for task in trees.tasks[1:])
        assert all(len(t.params["accuracy"]) == 2 for t in trees.tasks if t.params.get("arm") == "tree")


def test_arms_that_are_not_asked_for_start_no_engines():
    for arm, others in (("tree", "chains"), ("chain", "trees")):
        titles = [part.title for part in parts.parts(Options(work=Path("w"), arms=(arm,)))]
        assert not [title for title in titles if others in title]
        assert {title.partition(",")[0] for title in titles} == set(FIRST_HOUR)


def accepted(tree, answer):
    """How far down the tree the answer goes."""
    node, depth = -1, 0
    while True:
        children = np.nonzero((tree.parents == node) & (tree.token_ids == answer[depth]))[0]
        if not len(children):
            return depth
        node, depth = int(children[0]), depth + 1


@pytest.mark.parametrize("arm", plan.ARMS)
@pytest.mark.parametrize("tau", plan.DRAFTS)
def test_the_oracle_drafts_as_well_as_the_wanted_tokens_per_step_need(tau, arm):
    nodes = plan.DRAFTS[tau]
    accuracy = plan.accuracy_for(tau, nodes, arm)
    assert len(accuracy) == 1 + (arm == "tree")
    assert plan.expected_tokens(accuracy, nodes) == pytest.approx(tau, abs=1e-3)
    answer = np.random.default_rng(0).integers(1000, size=6000).astype(np.int32)
    drafter = OracleDrafter(OracleConfig(path="x", accuracy=accuracy), {"r": answer.tolist()})
    at = steps = 0
    while at < len(answer) - nodes - 1:
        view = RequestView("r", np.concatenate([[0], answer[:at]]).astype(np.int32), 1, 10_000, problem_id="r")
        (tree,) = ask(drafter, [view], nodes, nodes, is_chain=arm == "chain")
        at += 1 + accepted(tree, answer[at:])
        steps += 1
    assert at / steps == pytest.approx(tau, rel=0.06)


def test_our_engines_and_requests_are_configured_as_the_plugin_understands():
    for scene in scenes():
        for shape in plan.ARMS:
            config = parse(scene.spec_rollout(shape, "oracle.json"))
            assert (config.max_draft_tokens, config.shape) == (max(scene.nodes), shape)
        cell = scene.cells[-1]
        values = plan.params(scene, cell, nodes=scene.nodes[0])
        options = [parse_request(one["extra_args"]["spec_rollout"]) for one in values]
        assert {one.max_draft_tokens for one in options} == {scene.nodes[0]}
        assert len({one.problem_id for one in options}) == cell.batch
        assert all("extra_args" not in one for one in plan.params(scene, cell))
    for sizes in plan.MEMORY_ARMS.values():
        assert (parse(plan.memory_spec_rollout(sizes)) is None) == (sizes is None)


def test_the_kv_cache_holds_the_largest_cell_and_the_longest_request():
    for scene in scenes():
        model = plan.MODELS[scene.model]
        held = scene.kv_bytes // (model.layers * model.token_bytes)
        assert all(held >= cell.batch * (cell.context + 1 + scene.tokens) for cell in scene.cells)
        assert scene.arguments("folder")["max_model_len"] <= 1 << 16


def test_graphs_are_captured_for_every_batch_with_none_and_with_all_of_its_nodes():
    for scene in scenes():
        sizes = scene.capture_sizes
        for cell in scene.cells:
            assert cell.batch in sizes
            assert all(cell.batch * (1 + nodes) in sizes for nodes in scene.nodes)
        assert sizes == sorted(set(sizes)) and len(sizes) <= 40
        config = scene.arguments("folder")["compilation_config"]
        assert (config["cudagraph_capture_sizes"], config["max_cudagraph_capture_size"]) == (sizes, sizes[-1])


def test_a_cell_is_named_by_its_batch_and_its_context():
    assert Cell.parse("8x1024") == Cell(8, 1024) and str(Cell(8, 1024)) == "8 x 1024"
    for text in ("8", "x1024", "8x", "0x1024", "8x1000", "eightx64"):
        with pytest.raises(ConfigError, match="--cells"):
            Cell.parse(text)


def test_ngram_prompts_repeat_themselves_and_others_do_not():
    cell = Cell(2, 256)
    (one, two), (other, _) = plan.prompts(cell, 5000, "ngram"), plan.prompts(cell, 5000)
    assert len(one) == len(other) == 257 and one != two
    assert len(set(one)) <= 32 < len(set(other))


def test_the_7b_shape_has_the_size_it_is_named_after(tmp_path):
    written = json.loads((plan.write_model("7B", tmp_path) / "config.json").read_text())
    hidden, head = written["hidden_size"], written["hidden_size"] // written["num_attention_heads"]
    attention = 2 * hidden * head * (written["num_attention_heads"] + written["num_key_value_heads"])
    layer = attention + 3 * hidden * written["intermediate_size"]
    weights = written["num_hidden_layers"] * layer + 2 * written["vocab_size"] * hidden
    assert weights / 1e9 == pytest.approx(7.6, abs=0.1)
    assert (written["hidden_size"], written["num_hidden_layers"], written["vocab_size"]) == (3584, 28, 152064)


def test_a_chain_sees_what_stands_before_it_and_a_tree_its_ancestors():
    assert shapes.ancestor_words(3, "chain") == [0, 0b1, 0b11, 0b111]
    assert shapes.ancestor_words(5, "tree") == [0, 0b1, 0b11, 0b101, 0b1011, 0b10011]
    assert shapes.ancestor_words(64, "chain")[-1] == -1
