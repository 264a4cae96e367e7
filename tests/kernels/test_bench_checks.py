"""The kernel measurements' checks pass the kernels, and would not pass wrong ones."""

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.kernels import attention, flash, inputs, shapes, verdict
from bench.kernels.timing import HostTimer, Time, Timer

SMALL = shapes.MODELS["0.5B"]


@pytest.fixture(scope="module")
def kernels():
    return attention.load(), verdict.load_verify(), verdict.load_commit()


def test_the_kernels_pass(kernels, device):
    for context, batch, nodes, kind in shapes.ATTENTION_CHECKS[:3]:
        found = attention.checked(shapes.Attention(SMALL, context, batch, nodes, kind), device.type)
        assert found["passed"], (nodes, kind)
    for batch, nodes in shapes.VERIFY_CHECKS:
        assert verdict.checked_verify(batch, nodes, device.type)["passed"]
    for batch, nodes in shapes.COMMIT_CHECKS:
        assert verdict.checked_commit(batch, nodes, device.type)["passed"]


def test_attention_that_ignores_the_tree_is_found_out(kernels, device):
    def causal(*arguments, **options):
        kernels[0](*arguments[:-1], torch.full_like(arguments[-1], -1), **options)

    assert not attention.checked(shapes.Attention(SMALL, 53, 2, 7, "tree"), device.type, causal)["passed"]


def test_a_commit_that_moves_nothing_is_found_out(kernels, device):
    class Idle:
        CacheTable = kernels[2].CacheTable

        @staticmethod
        def kv_commit(*_):
            """Moves nothing."""

    found = verdict.checked_commit(1, 7, device.type, Idle)
    assert not found["passed"] and "differ" in found["checked"]


class Watch(Timer):
    """In place of the timer: every call is made once, and takes as long as the test says."""

    device, copy_bytes = "cpu", 1

    def __init__(self):
        self.bandwidth, self.calls = 1e12, 0

    def time(self, calls):
        self.calls += len(calls)
        for call in calls:
            call()
        return Time.of([1.0, 2.0, 3.0])


CASE = shapes.Attention(SMALL, 40, 2, 7, "tree")


def test_what_is_measured_is_checked_at_that_very_shape_and_goes_into_json(device):
    watch = Watch()
    values = json.loads(json.dumps(attention.measure(watch, CASE, "cpu", layers=2)))
    assert values["passed"] and "the specification" in values["checked"]
    assert values["times"]["ours"]["median_us"] == 2.0 and watch.calls == 2
    assert values["notes"] == ["FlashAttention 3 needs a GPU"]
    for measure in (verdict.measure_verify, verdict.measure_commit):
        assert measure(Watch(), shapes.Verdict(SMALL, 1, 3), "cpu")["times"]["ours"]["samples"] == 3


def test_a_kernel_that_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(attention, "load", lambda: lambda *arguments, **_: arguments[3].zero_())
    values = attention.measure(Watch(), CASE, "cpu", layers=1)
    assert not values["passed"] and values["times"] == {}
    assert values["notes"][-1] == "ours is wrong, so it is not timed"


def test_a_way_that_fails_is_left_out_with_its_reason(monkeypatch):
    class Failing(Watch):
        def time(self, calls):
            raise RuntimeError("cannot be captured\nfor reasons")

    values = attention.measure(Failing(), CASE, "cpu", layers=1)
    assert values["passed"] and values["times"] == {}
    assert values["notes"][-1] == "ours: RuntimeError: cannot be captured"


class Flash:
    """FlashAttention 3 in PyTorch, called with what the real one takes."""

    def __init__(self, monkeypatch):
        spec = importlib.util.find_spec("vllm")
        if spec is None:
            pytest.skip("its interface is compared with vLLM's, which is not installed")
        self.signatures = signatures(Path(spec.origin).parent / "vllm_flash_attn" / "flash_attn_interface.py")
        fake = SimpleNamespace(flash_attn_varlen_func=self.attend, get_scheduler_metadata=self.schedule)
        monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", fake)
        monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", SimpleNamespace(flash_attn_interface=fake))

    def schedule(self, **options):
        assert set(options) <= self.signatures["get_scheduler_metadata"]
        return {name: options[name] for name in ("causal", "num_splits", "max_seqlen_q", "max_seqlen_k")}

    def attend(self, **options):
        assert set(options) <= self.signatures["flash_attn_varlen_func"]
        # a schedule made for another call has made kernels read out of bounds
        schedule = options.get("scheduler_metadata", {})
        assert all(schedule[name] == options[name] for name in schedule)
        assert options["fa_version"] == 3
        out, lse = options["out"], torch.empty(options["q"].shape[1], options["q"].shape[0])
        starts = options["cu_seqlens_q"].tolist()
        group = options["q"].shape[1] // options["k"].shape[2]
        for r, length in enumerate(options["seqused_k"].tolist()):
            rows = slice(starts[r], starts[r + 1])
            keys, values = (
                part[options["block_table"][r].long()].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
                for part in (options["k"], options["v"])
            )
            scores = torch.einsum("qhd,khd->hqk", options["q"][rows].double(), keys) * options["softmax_scale"]
            if options["causal"]:
                count = scores.shape[1]
                hidden = torch.arange(length)[None] > torch.arange(length - count, length)[:, None]
                scores = scores.masked_fill(hidden, float("-inf"))
            lse[:, rows] = scores.logsumexp(-1).float()
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
        return (out, lse) if options.get("return_softmax_lse") else out


def signatures(path):
    """Function -> names of its arguments; by reading, for importing needs the CUDA extensions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.fixture
def tree_inputs():
    return inputs.make_attention(CASE, "cpu")


def test_flash_attention_over_the_context_and_our_kernel_over_the_nodes_are_tree_attention(monkeypatch, tree_inputs):
    Flash(monkeypatch)
    out = attention.ours(tree_inputs, "cuda", attention.load())()
    # two roundings to bf16 instead of one
    assert attention.excess(out.double(), attention.specified(tree_inputs)) <= attention.TOLERANCE


def test_flash_attention_is_called_as_vllm_calls_it_and_sees_a_chain(monkeypatch):
    Flash(monkeypatch)
    chain = shapes.Attention(SMALL, 40, 2, 7, "chain")
    made = inputs.make_attention(chain, "cpu")
    for splits in (flash.AUTO, flash.graph_splits()):
        found = flash.causal(made, splits)()
        assert attention.excess(found.double(), attention.specified(made)) <= attention.TOLERANCE
    assert flash.graph_splits() > 1


def test_every_way_is_tried_beside_ours_where_there_is_a_gpu(monkeypatch):
    Flash(monkeypatch)
    made = [inputs.make_attention(CASE, "cpu")]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ways, notes = attention._flash_ways(made, "cuda")
    assert list(ways) == ["fa3 graph", "fa3 auto", "fa3 context"] and notes == []


def test_the_hosts_clock_stands_in_for_the_device_in_a_dry_walk():
    time = HostTimer().time([lambda: None, lambda: None])
    assert time.low_us <= time.median_us <= time.high_us
    assert HostTimer().bandwidth > 0
