"""A weight transfer by gloo, for CPUs, where vLLM has none: the backend in the workers, and a trainer that sends.

Every tensor is a sum over trainer and workers, of which the workers add nothing: gloo's groups outside the global one
know no broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

NAME = "tests-gloo"


@dataclass
class Init(WeightTransferInitInfo):
    host: str
    port: int
    rank_offset: int
    world_size: int


@dataclass
class Update(WeightTransferUpdateInfo):
    # name -> shape
    shapes: dict[str, list[int]]


class GlooEngine(WeightTransferEngine[Init, Update]):
    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info: Init) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        self.group = meet(init_info.host, init_info.port, rank, init_info.world_size)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # vLLM waits for an accelerator besides

    def receive_weights(self, update_info: Update) -> None:
        found = {name: torch.zeros(shape) for name, shape in update_info.shapes.items()}
        for tensor in found.values():
            self.group.allreduce([tensor]).wait()
        self.model.load_weights(found.items())

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class Extension:
    """Of a worker, which registers the backend where it is imported."""


WeightTransferEngineFactory.register_engine(NAME, GlooEngine)


def meet(host: str, port: int, rank: int, world_size: int) -> Any:
    return stateless_init_torch_distributed_process_group(host, port, rank, world_size, "gloo")


def shapes_of(folder: str) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in load_file(f"{folder}/model.safetensors").items()}


def train(port: int, world_size: int, folders: list[str], turn: Any) -> None:
    """A trainer's process: it sends each folder's weights when it is its turn."""
    group = meet("127.0.0.1", port, 0, world_size)
    for folder in folders:
        turn.acquire()
        for tensor in load_file(f"{folder}/model.safetensors").values():
            group.allreduce([tensor]).wait()
