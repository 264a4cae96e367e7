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


def start_profile(worker: Any) -> None:
    import torch

    on_cuda = worker.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_cuda else torch.profiler.ProfilerActivity.CPU
    worker.bench_profiler = torch.profiler.profile(activities=[activity])
    worker.bench_profiler.start()


def end_profile(worker: Any) -> dict[str, Any]:
    import torch

    on_cuda = worker.device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize()
    profiler, worker.bench_profiler = worker.bench_profiler, None
    profiler.stop()
    kind = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    spans: list[tuple[int, int]] = []
    totals: dict[str, list[Any]] = {}
    for event in profiler.profiler.kineto_results.events():
        # an annotation spans what it names, idle or not; not every torch tells
        is_annotation = getattr(event, "is_user_annotation", bool)()
        if event.device_type() != kind or not event.duration_ns() or is_annotation:
            continue
        spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        total = totals.setdefault(event.name()[:120], [0.0, 0])
        total[0] += event.duration_ns() / 1e6
        total[1] += 1
    busy = end = 0
    for begin, until in sorted(spans):
        busy += max(0, until - max(begin, end))
        end = max(end, until)
    kernels = sorted(([name, *total] for name, total in totals.items()), key=lambda row: -row[1])
    return {"busy_ms": busy / 1e6, "kernels": kernels[:12]}
