"""What is told of an engine's steps from the kernels that a profiler saw."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from bench.runner import worker_calls

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
MS = 1_000_000


def event(kind, begin_ms, ms, name, launch):
    return SimpleNamespace(
        device_type=lambda: kind,
        start_ns=lambda: int(begin_ms * MS),
        duration_ns=lambda: int(ms * MS),
        name=lambda: name,
        correlation_id=lambda: launch,
        is_user_annotation=lambda: name == "note",
    )


@pytest.fixture
def traced(monkeypatch):
    """What is told of so many steps, each begun 10 ms after the last and computed 5 ms later than it is launched."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run(steps, at=2):
        events = []
        for i in range(steps):
            events += [event(CPU, 10 * i + 1, 0.1, "cudaGraphLaunch", 2 * i + 1)]
            events += [
                event(CUDA, 10 * i + 15, 2, "products", 2 * i + 1),
                event(CUDA, 10 * i + 17, 1, "attention", 2 * i + 1),
            ]
            events += [event(CPU, 10 * i + 2, 0.1, "cudaLaunchKernel", 2 * i + 2)]
            events += [
                event(CUDA, 10 * i + 20, 1 + i % 2, "products", 2 * i + 2),
                event(CUDA, 10 * i + 15, 9, "note", 0),
            ]
        results = SimpleNamespace(events=lambda: events)
        profiler = SimpleNamespace(stop=lambda: None, profiler=SimpleNamespace(kineto_results=results))
        runner = SimpleNamespace(execute_model="wrapped", prepare_inputs="wrapped")
        seen = [{"begin": 10 * i * MS, "rows": i} for i in range(steps)]
        worker = SimpleNamespace(device=SimpleNamespace(type="cuda"), model_runner=runner, bench_trace=(profiler, seen))
        told = worker_calls.end_trace(worker, at)
        assert not vars(runner) and not hasattr(worker, "bench_trace")
        return told

    return run


def test_five_steps_are_told_by_when_the_host_launched_what_the_device_did(traced):
    told = traced(9)
    assert [one["rows"] for one in told["steps"]] == [2, 3, 4, 5, 6]
    assert told["steps"][0] == {
        "rows": 2, "launches": 2, "kernels": 3, "span_ms": 6.0, "busy_ms": 4.0, "gap_ms": 3.0,
    }  # fmt: skip
    assert told["dearest"] == [["products", 17.0, 10], ["attention", 5.0, 5]]


def test_of_a_short_run_the_last_steps_are_told_but_never_the_first(traced):
    assert [one["rows"] for one in traced(6, at=20)["steps"]] == [1, 2, 3, 4, 5]
    assert [one["rows"] for one in traced(2)["steps"]] == [1]
    assert traced(1) == {"steps": [], "dearest": []}
