"""Devices of a process: CPU cores or GPUs by number, and the environment that binds a process to them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_specrollout.errors import ConfigError, shown

FORM = r"(cpu|cuda):([0-9]{1,5}(?:-[0-9]{1,5})?(?:,[0-9]{1,5}(?:-[0-9]{1,5})?)*)"
_MOST = 4096


@dataclass(frozen=True, slots=True)
class Devices:
    """What one process runs on."""

    # `cpu` or `cuda`
    kind: str
    # cores, or GPUs as the driver's process counts them; each once, in the order given
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(map(str, self.numbers))}"

    def environment(self, ranks: int = 1) -> dict[str, str]:
        """What a process gets that is to run on these and no others, whatever its parent's environment says.

        Args:
            ranks: that share the cores, where it begins so many.
        """
        if self.kind == "cuda":
            # Ray would set the variable by the GPUs that it counts for the actor
            return {"CUDA_VISIBLE_DEVICES": self._visible(), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        parts = [",".join(map(str, part.numbers)) for part in shares(self.numbers, ranks)]
        return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(parts), "OMP_NUM_THREADS": str(-(-len(self.numbers) // ranks))}

    def _visible(self) -> str:
        """As the driver of the GPUs counts them: this process may see some of the host's alone."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if not seen:
            return ",".join(map(str, self.numbers))
        names = [name.strip() for name in seen.split(",") if name.strip()]
        if max(self.numbers) >= len(names):
            cause = f"`cuda:{max(self.numbers)}` is to be used, and {len(names)} GPUs are visible (`{seen}`)"
            raise ConfigError(cause, "name GPUs from 0 on, as CUDA_VISIBLE_DEVICES lists them")
        return ",".join(names[number] for number in self.numbers)


def parse_devices(name: str, text: str) -> Devices:
    """Devices such as `cpu:2`, `cpu:0-3`, `cuda:1` and `cuda:1,2`, whose GPUs are the ranks of one engine.

    Args:
        name: of the option, as an error names it.

    Raises:
        ConfigError: it has another form, or names a device twice.
    """
    found = re.fullmatch(FORM, text) if isinstance(text, str) else None
    if found is None:
        raise ConfigError(f"`{name}` names {shown(text)}, and no devices", "name cores or GPUs, as cpu:0-3 or cuda:1,2")
    numbers: list[int] = []
    for part in found[2].split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), min(int(last or first), int(first) + _MOST) + 1)
    if not numbers or len(set(numbers)) < len(numbers) or len(numbers) > _MOST:
        raise ConfigError(f"`{name}` names {shown(text)}: a device twice, none, or above {_MOST}", "name each once")
    return Devices(found[1], tuple(numbers))


def together(name: str, texts: Sequence[str]) -> Devices | None:
    """The devices of one process, named one by one; None: none are.

    Raises:
        ConfigError: as `parse_devices`, or cores beside GPUs.
    """
    each = [parse_devices(name, text) for text in texts]
    if not each:
        return None
    if len({one.kind for one in each}) > 1:
        raise ConfigError(f"`{name}` names {shown(list(texts))}: cores beside GPUs", "name devices of one kind")
    return Devices(each[0].kind, tuple(dict.fromkeys(number for one in each for number in one.numbers)))


def shared(kind: str, index: int) -> tuple[str, ...]:
    """The devices of this process, for one that shares them: its GPU, or the cores that its threads are bound to.

    Args:
        index: of the GPU, as this process counts them.
    """
    if kind == "cuda":
        return (f"cuda:{index}",)
    cores = f"cpu:{os.environ.get('VLLM_CPU_OMP_THREADS_BIND', '').replace('|', ',')}"
    return (cores,) if re.fullmatch(FORM, cores) else ()


def check_apart(name: str, devices: Sequence[Devices]) -> None:
    """Refuse two engines on one GPU, where neither finds the memory that it counts on. Cores may be shared.

    Raises:
        ConfigError: a GPU is named twice.
    """
    seen: set[int] = set()
    for one in devices:
        twice = seen.intersection(one.numbers) if one.kind == "cuda" else set()
        if twice:
            raise ConfigError(f"`{name}` gives cuda:{min(twice)} to two engines", "give each engine GPUs of its own")
        seen.update(one.numbers if one.kind == "cuda" else ())


def shares(cores: Sequence[int], count: int) -> list[Devices]:
    """The cores of each of `count` engines: equal parts, or one core each in turns where there are fewer cores."""
    if count > len(cores):
        return [Devices("cpu", (cores[i % len(cores)],)) for i in range(count)]
    size, more = divmod(len(cores), count)
    ends = [i * size + min(i, more) for i in range(count + 1)]
    return [Devices("cpu", tuple(cores[begin:stop])) for begin, stop in zip(ends, ends[1:], strict=False)]
