"""Functions that a benchmark has an engine's worker run; each is sent there whole, so it imports what it needs itself.

Nothing of this project may be imported here: stock vLLM's workers run these too.
"""

from __future__ import annotations

from typing import Any


def randomise(worker: Any, logit_std: float) -> int:
    """Fill each weight from a generator seeded with its name: embeddings of variance 1, products that keep it."""
    import zlib

    import torch

    checksum = 0
    for name, weight in worker.get_model().named_parameters():
        data = weight.data
        generator = torch.Generator(device=data.device).manual_seed(zlib.crc32(name.encode()))
        if data.ndim == 1:
            data.fill_(1.0 if "norm" in name else 0.0)
        else:
            std = 1.0 if "embed" in name else data.shape[1] ** -0.5 * (logit_std if "lm_head" in name else 1.0)
            data.normal_(0.0, std, generator=generator)
        bits = data.view({2: torch.int16, 4: torch.int32}[data.element_size()])
        checksum = (checksum * 31 + int(bits.sum(dtype=torch.int64))) % (1 << 61)
    return checksum


def facts(worker: Any) -> dict[str, Any]:
    import torch

    config, runner = worker.vllm_config, worker.model_runner
    compilation = config.compilation_config
    impls = [layer.impl for layer in compilation.static_forward_context.values() if hasattr(layer, "impl")]
    managers = {"stock": getattr(runner, "cudagraph_manager", None)}
    if (own := getattr(runner, "draft_graphs", None)) is not None:
        managers["trees"] = own.trees
    on_cuda = worker.device.type == "cuda"
    return {
        "worker": type(worker).__qualname__,
        "runner": [f"{base.__module__}.{base.__qualname__}" for base in type(runner).__mro__[:-1]],
        "is_v2": bool(config.use_v2_model_runner),
        "attention": sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}),
        "attention_layers": sorted({type(impl).__qualname__ for impl in impls}),
        "flash_attention": sorted({str(getattr(impl, "vllm_flash_attn_version", None)) for impl in impls}),
        "is_async": bool(config.scheduler_config.async_scheduling),
        "scheduler": str(config.scheduler_config.scheduler_cls),
        "cudagraph_mode": str(compilation.cudagraph_mode),
        "compilation_mode": str(compilation.mode),
        "capture_sizes": list(compilation.cudagraph_capture_sizes or []),
        "graphs": {name: len(getattr(one, "graphs", ())) for name, one in managers.items() if one is not None},
        "block_size": int(config.cache_config.block_size),
        "kv_blocks": int(config.cache_config.num_gpu_blocks or 0),
        "kv_dtype": str(config.cache_config.cache_dtype),
        "device": torch.cuda.get_device_name() if on_cuda else worker.device.type,
        "device_mib": torch.cuda.memory_reserved() / 2**20 if on_cuda else None,
    }


def start_trace(worker: Any) -> None:
    """Begin to look: at the device, and at what each step computes."""
    import time

    import torch

    runner, steps = worker.model_runner, []
    execute, prepare = runner.execute_model, getattr(runner, "prepare_inputs", None)

    def executed(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append({"begin": time.time_ns(), "rows": scheduled.total_num_scheduled_tokens})
        return execute(scheduled, *args, **kwargs)

    def prepared(*args: Any, **kwargs: Any) -> Any:
        chosen = next(one for one in (*args, *kwargs.values()) if hasattr(one, "cg_mode"))
        steps[-1] |= {"padded": chosen.num_tokens, "graph": chosen.cg_mode.name}
        return prepare(*args, **kwargs)

    runner.execute_model = executed
    # V1 tells nothing of its graphs
    if prepare is not None:
        runner.prepare_inputs = prepared
    on_cuda = worker.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_cuda else torch.profiler.ProfilerActivity.CPU
    worker.bench_trace = torch.profiler.profile(activities=[activity]), steps
    worker.bench_trace[0].start()


def end_trace(worker: Any, at: int) -> dict[str, Any]:
    """What was seen of five steps: from `at` on, or the last ones of a shorter run.

    Returns:
        steps: of each rows, padded (rows computed) and graph (its mode); span_ms, from its first kernel's begin to its
            last one's end; busy_ms of that, in which the device worked; gap_ms, idle before it; launches; kernels.
        dearest: ten kernels of these steps: [name, milliseconds, times].
    """
    profiler, steps = worker.__dict__.pop("bench_trace")
    for name in ("execute_model", "prepare_inputs"):
        worker.model_runner.__dict__.pop(name, None)
    own = launched_in(profiler, [step.pop("begin") for step in steps], worker.device.type == "cuda")
    # a step that launched nothing is none
    seen = [(step, sorted(kernels)) for step, kernels in zip(steps, own, strict=True) if kernels]
    first, found = max(1, min(at, len(seen) - 5)), []
    # kernel -> milliseconds, times
    totals: dict[str, list[float]] = {}
    for (step, kernels), (_, before) in list(zip(seen[1:], seen, strict=False))[first - 1 : first + 4]:
        begin = end = kernels[0][0]
        busy, until = 0, max(one[1] for one in before)
        for start, stop, name, _ in kernels:
            busy += max(0, stop - max(start, end))
            end = max(end, stop)
            total = totals.setdefault(name, [0.0, 0])
            total[:] = total[0] + (stop - start) / 1e6, total[1] + 1
        counts = {"launches": len({one[3] for one in kernels}), "kernels": len(kernels)}
        times = {"span_ms": (end - begin) / 1e6, "busy_ms": busy / 1e6, "gap_ms": (begin - until) / 1e6}
        found.append({**step, **times, **counts})
    dearest = sorted(([name, *total] for name, total in totals.items()), key=lambda row: -row[1])
    return {"steps": found, "dearest": dearest[:10]}


def launched_in(profiler: Any, begins: list[int], on_cuda: bool) -> list[list[tuple[int, int, str, int]]]:
    """(begin, end, name, launch) of the kernels of each step, nanoseconds since 1970."""
    import bisect

    import torch

    if on_cuda:
        torch.cuda.synchronize()
    profiler.stop()
    # an annotation spans what it names, idle or not; not every torch tells
    events = [
        one for one in profiler.profiler.kineto_results.events() if not getattr(one, "is_user_annotation", bool)()
    ]
    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    # a kernel belongs to the step in which the host launched it, and a graph is one launch of many
    launched = {one.correlation_id(): one.start_ns() for one in events if one.device_type() == cpu}
    found: list[list[tuple[int, int, str, int]]] = [[] for _ in begins]
    for one in events:
        start, launch = one.start_ns(), one.correlation_id()
        at = bisect.bisect(begins, launched.get(launch, start) if on_cuda else start) - 1
        if one.device_type() == (cuda if on_cuda else cpu) and one.duration_ns() and at >= 0:
            found[at].append((start, start + one.duration_ns(), one.name()[:120], launch))
    return found
