"""Texts on the device: it holds what its plan says, after each call, and as much memory as was granted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.texts import Texts
from vllm_specrollout.types import Answer, FinishReason
from vllm_specrollout.worker.v2.texts import DeviceTexts


def test_the_device_holds_what_is_planned_within_its_share_of_memory() -> None:
    config, device = HistoryConfig(max_mib=1), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store = HistoryStore(config)
    plan = Texts(config, store, most_problems=4, past=3, executor=ThreadPoolExecutor(1))
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    there = DeviceTexts(plan, device, stream)
    assert there.texts.nbytes + there.spans.nbytes == plan.stats().num_bytes <= 1 << 20
    rng = np.random.default_rng(0)
    plan.want("p")
    for number in range(40):
        prompt, answer = (rng.integers(1, 1000, size).astype(np.int32) for size in (50, 20_000))
        plan.add(store.append(Answer(str(number), "p", prompt, answer, FinishReason.FINISHED, 0)))
        there.apply()
        if stream is not None:
            stream.synchronize()
        spans = there.spans[plan.row("p")].cpu().numpy()
        begin, end, weight = spans[spans[:, 1] > spans[:, 0]][-1].tolist()
        assert there.texts[begin:end].tolist() == [*prompt[-32:].tolist(), *answer.tolist()] and weight == 0
    there.apply()
    plan.close()
