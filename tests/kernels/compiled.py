"""What the kernels become on GPUs that are not here: registers, spills, shared memory.

    python -m tests.kernels.compiled [--gpus 90,120] [--cases REGEX]    what it finds, as JSON
    python -m tests.kernels.compiled [--gpus 90] --update               rewrite this Triton's part of compiled.json

The engine's own warm-up is run, which launches whatever a step may launch, under a driver of Triton's that has no
device: Triton chooses argument types as in an engine and compiles, and nothing is launched. A program of its own, since
the tests' process interprets kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("compiled.json")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A compute capability's limits (CUDA C++ programming guide, "Technical specifications")."""

    name: str
    # bytes: what one program may have, and what the programs of a multiprocessor share
    shared_memory: int
    shared_of_all: int
    threads: int
    programs: int

    def resident(self, found: dict[str, int]) -> int:
        """Programs of a kernel that a multiprocessor holds at once."""
        by_warp = -(-found["registers"] * 32 // 256) * 256
        return min(
            self.programs,
            self.threads // (32 * found["warps"]),
            4 * ((64 << 10) // 4 // by_warp) // found["warps"],
            self.shared_of_all // (found["shared"] + (1 << 10)),
        )


GPUS = {
    80: Gpu("A100", 163 << 10, 164 << 10, 2048, 32),
    # 8.6 (A10, RTX 30) has the same limit for a program, and no code of its own here
    89: Gpu("L40S, RTX 40", 99 << 10, 100 << 10, 1536, 24),
    90: Gpu("H100, H200", 227 << 10, 228 << 10, 2048, 32),
    100: Gpu("B200", 227 << 10, 228 << 10, 2048, 32),
    120: Gpu("RTX 50, RTX Pro 6000", 99 << 10, 100 << 10, 1536, 24),
}


HOPPER = 90


@dataclass(frozen=True, slots=True)
class Model:
    """What the attention kernel is compiled for."""

    heads: int
    kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    softcap: float = 0.0
    nodes: int = 24
    # on all GPUs; otherwise on Hopper
    is_whole: bool = False

    def warm_up(self, gpu: Gpu) -> None:
        import torch
        from vllm_specrollout.kernels.tree_attention.kernel import attend_to_nodes

        row, own = (
            torch.zeros(1, heads, self.head_size, dtype=getattr(torch, self.dtype))
            for heads in (self.heads, self.kv_heads)
        )
        none = torch.zeros(2, dtype=torch.int32)
        attend_to_nodes(
            row, own, own, row, torch.zeros(self.heads, 1), none, none[:1], none.long(),
            scale=1.0, softcap=self.softcap, most_nodes=self.nodes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verified:
    """What the sampling and the walking kernel are compiled for."""

    vocab: int
    width: int
    dtype: str = "bfloat16"
    use_fp64: bool = False
    is_philox: bool = False
    is_whole: bool = False

    def warm_up(self, gpu: Gpu) -> None:
        import torch
        from vllm_specrollout.kernels.tree_verify.kernel import noise_of, tree_verify

        root, temperature = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
        tokens = root.to(torch.int32)
        tree_verify(
            torch.zeros(1, self.vocab, dtype=getattr(torch, self.dtype)),
            root, temperature, root, root, tokens, tokens - 1, torch.tensor([0, 1], dtype=torch.int32),
            width=self.width, use_fp64=self.use_fp64, is_philox=self.is_philox,
        )  # fmt: skip
        likeliest = torch.zeros(1, 512, dtype=torch.int64)
        noise_of(likeliest, root, temperature, root, root, use_fp64=self.use_fp64, is_philox=self.is_philox)


@dataclass(frozen=True, slots=True)
class Committed:
    """What the committing kernel is compiled for: caches of one byte per element have odd sizes, too."""

    kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    is_whole: bool = False

    def warm_up(self, gpu: Gpu) -> None:
        import torch
        from vllm_specrollout.kernels.kv_commit.kernel import CacheTable, kv_commit

        cache = torch.zeros(2, self.kv_heads, 16, 2 * self.head_size, dtype=getattr(torch, self.dtype))
        none = torch.zeros(1, 2, dtype=torch.int32)
        kv_commit(CacheTable.of([cache]), torch.zeros(1, dtype=torch.int64), none[0], none, none[0, :1])


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What scanning and voting are compiled for."""

    nodes: int
    ends: int = 1
    is_whole: bool = False

    def warm_up(self, gpu: Gpu) -> None:
        import torch
        from vllm_specrollout.kernels.lookup.kernel import Lookup

        row = torch.zeros(1, 18, dtype=torch.int32)
        Lookup(self.nodes, 1, 64, row.device, max_depth=self.nodes)(
            row[0], torch.zeros(1, 64, 3, dtype=torch.int32), row, row[0, :1], row[0, :1], row, row[0, :1], row[0, :1],
            torch.zeros(1, self.ends, dtype=torch.int32), 64,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LaidOut:
    """What laying drafts out over a step's rows is compiled for."""

    nodes: int
    is_whole: bool = False

    def warm_up(self, gpu: Gpu) -> None:
        import torch
        from vllm_specrollout.kernels.tree_rows.kernel import lay_out

        none, bounds = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        drafted = torch.zeros(2, 3 * self.nodes + 1, dtype=torch.int32)[:, :-1].unflatten(1, (3, self.nodes))
        for has_branches in (False, True):
            lay_out(
                drafted, none.long(), bounds, bounds, none, none, none, none, none.long(), none,
                has_branches=has_branches,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chosen:
    """What choosing among drafts is compiled for: lookups alone, which may branch, and all three kinds."""

    nodes: int
    is_whole: bool = False

    def warm_up(self, gpu: Gpu) -> None:
        import torch
        from vllm_specrollout.kernels.draft_choice.kernel import choose

        none, known = torch.zeros(1, dtype=torch.int32), torch.zeros(1, self.nodes)
        words = torch.zeros(1, 3 * self.nodes + 1, dtype=torch.int32)
        looked = torch.zeros(2, self.nodes, dtype=torch.int32)
        given = (words, known, none.long(), words, none, none, none, none[:, None], torch.zeros(3, 10))
        choose(*given, looked=(*looked[:, None], known), has_branches=True)
        choose(
            *given, looked=(*looked[:, None], known), lines=torch.zeros(1, 65, dtype=torch.int32),
            modelled=(*looked[:, None], known),
        )  # fmt: skip


Case = Model | Verified | Committed | LookedUp | LaidOut | Chosen
CASES: dict[str, Case] = {
    "heads of 64, 7 per key (Qwen2.5-0.5B)": Model(14, 2, 64, is_whole=True),
    "heads of 64, 4 per key (Llama-3.2-1B)": Model(32, 8, 64),
    "heads of 64, 71 per key (Falcon-7B)": Model(71, 1, 64),
    "heads of 80, 1 per key (phi-2)": Model(32, 32, 80),
    "heads of 96, 1 per key (Phi-3-mini)": Model(32, 32, 96),
    "heads of 128, 1 per key (Llama-2-7B)": Model(32, 32, 128),
    "heads of 128, 2 per key, capped": Model(32, 16, 128, softcap=50.0),
    "heads of 128, 4 per key (Qwen3-8B)": Model(32, 8, 128, is_whole=True),
    "heads of 128, 4 per key, eight ranks (Qwen3-8B)": Model(4, 1, 128),
    "heads of 128, 4 per key, float16": Model(32, 8, 128, dtype="float16"),
    "heads of 128, 5 per key (Qwen2.5-14B)": Model(40, 8, 128),
    "heads of 128, 7 per key (Qwen2.5-7B)": Model(28, 4, 128),
    "heads of 128, 8 per key (Qwen3-32B)": Model(64, 8, 128),
    "heads of 128, 16 per key (GLM-4-9B)": Model(32, 2, 128),
    "heads of 256, 4 per key": Model(16, 4, 256),
    "heads of 128, 4 per key, 64 nodes": Model(32, 8, 128, nodes=64, is_whole=True),
    "heads of 128, 4 per key, 8 nodes": Model(32, 8, 128, nodes=8),
    "heads of 256, 2 per key, capped, 64 nodes": Model(16, 8, 256, softcap=50.0, nodes=64, is_whole=True),
    "24 drafts of 151,936 tokens": Verified(151936, 25, is_whole=True),
    "24 drafts of 151,936 tokens, float32": Verified(151936, 25, "float32"),
    "24 drafts of 151,936 tokens, noise of float64": Verified(151936, 25, "float32", use_fp64=True),
    "24 drafts of 151,936 tokens, noise of Philox": Verified(151936, 25, "float32", is_philox=True),
    "64 drafts of 256,000 tokens": Verified(256000, 65),
    "1 draft of 1,000 tokens": Verified(1000, 2),
    "8 key heads of 128": Committed(8, 128, is_whole=True),
    "1 key head of 128": Committed(1, 128),
    "4 key heads of 80 in bytes": Committed(4, 80, "float8_e4m3fn"),
    "lookups of 16 tokens": LookedUp(16, is_whole=True),
    "lookups of 16 tokens, 8 ends": LookedUp(16, 8),
    "rows of 24 drafts": LaidOut(24, is_whole=True),
    "the best of 24 drafts": Chosen(24, is_whole=True),
}


class NoDevice:
    """A driver for Triton: of one target, without a device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # what Triton keeps its compiled kernels by
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(name: str, capability: int) -> list[dict[str, Any]]:
    """Everything that one case launches on one GPU."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    case, found = CASES[name], dict[str, dict[str, Any]]()
    launch: Callable[..., Any] = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            kernel = launch(self, *args, grid=grid, warmup=True, **options)
        LOGS.setdefault(kernel.hash, said.getvalue())
        form = _form(options)
        found[f"{self.fn.__name__} {form}"] = {
            "case": name, "kernel": self.fn.__name__, "form": form, "gpu": capability, **_read(kernel)
        }  # fmt: skip

    driver.set_active(NoDevice(capability))
    JITFunction.run = compile_only
    try:
        case.warm_up(GPUS[capability])
    finally:
        JITFunction.run = launch
    return list(found.values())


# ptxas' words on a kernel, by its hash: said once, however often the kernel is launched
LOGS: dict[str, str] = {}


def _form(options: dict[str, Any]) -> str:
    """Which of a kernel's forms it is, in a word; empty for the only one."""
    return "branches" if options.get("HAS_BRANCHES") else ""


def _read(kernel: Any) -> dict[str, Any]:
    """A compiled kernel's needs, and its matrix instructions."""
    log = LOGS[kernel.hash]
    matrix = re.findall(r"(?:wgmma\.mma_async|tcgen05\.mma|\bmma\.sync)\.\S+", kernel.asm["ptx"])
    return {
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),  # type: ignore[index]
        "spilled": int(re.search(r"(\d+) bytes spill stores", log)[1]),  # type: ignore[index]
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "products": sorted(set(matrix)),
    }


def cell(row: dict[str, Any]) -> list[int]:
    """What the table says of a kernel on one GPU; the last is how many programs a multiprocessor holds at once."""
    return [row["registers"], row["spilled"], row["shared"], GPUS[row["gpu"]].resident(row)]


def jobs(gpus: Iterable[int], cases: str) -> list[tuple[str, int]]:
    """(case, GPU) of all that is compiled of the cases whose names match."""
    pairs = itertools.product((name for name in CASES if re.search(cases, name)), gpus)
    return [(name, gpu) for name, gpu in pairs if gpu == HOPPER or CASES[name].is_whole]


def sweep(gpus: Iterable[int], cases: str = "") -> Iterator[dict[str, Any]]:
    """Compile them, a process per core."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn, _begin) as pool:
        for rows in pool.map(compiled, *zip(*jobs(gpus, cases), strict=True)):
            yield from rows


def _begin() -> None:
    """A process' own cache, which is empty: a kernel that is found compiled has no log."""
    global _cache
    _cache = tempfile.TemporaryDirectory()
    os.environ.update(TRITON_CACHE_DIR=_cache.name, TRITON_DUMP_PTXAS_LOG="1")
    os.environ.pop("TRITON_INTERPRET", None)


_cache: Any = None


def update(found: Iterable[dict[str, Any]]) -> None:
    """Rewrite this Triton's part of the table: a line per variant, with a cell per GPU."""
    import triton

    lines: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    for row in found:
        cells = lines.setdefault((row["case"], row["kernel"], row["form"]), {})
        cells[str(row["gpu"])] = cell(row)
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    table[triton.__version__] = [
        dict(zip(("case", "kernel", "form"), key, strict=True)) | {"gpus": cells} for key, cells in lines.items()
    ]
    parts = []
    for version in sorted(table, reverse=True):
        rows = ",\n".join(f"  {json.dumps(row)}" for row in table[version])
        parts.append(f' "{version}": [\n{rows}\n ]')
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=lambda text: [int(one) for one in text.split(",")], default=list(GPUS))
    parser.add_argument("--cases", default="", help="a regular expression over their names")
    parser.add_argument("--update", action="store_true")
    asked = parser.parse_args()
    if asked.update:
        update(sweep(asked.gpus))
    else:
        print(json.dumps(list(sweep(asked.gpus, asked.cases))))


if __name__ == "__main__":
    main()
