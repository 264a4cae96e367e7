"""A vLLM engine that drafts: it is told of requests by messages, and drafts for all that may be drafted for."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request

from vllm_specrollout.cluster.counter import NoiseKind
from vllm_specrollout.cluster.loop import Work
from vllm_specrollout.cluster.messages import Close, Drafts, Message, Open, Verdict
from vllm_specrollout.cluster.stream import Stream, Survival
from vllm_specrollout.types import MOST_NODES
from vllm_specrollout.worker.streams.scheduler import StreamScheduler

_WORKER = "vllm_specrollout.worker.streams.runner.StreamCPUWorker"
_SCHEDULER = "vllm_specrollout.worker.streams.scheduler.StreamScheduler"


class StreamEngine:
    """One model that drafts for one target.

    Args:
        model: its folder or name.
        most_nodes: nodes of a stream that are looked behind, at most.
        engine_args: further arguments of vLLM's engine.
    """

    def __init__(self, model: str, most_nodes: int = 16, engine_args: dict[str, Any] | None = None) -> None:
        own: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "async_scheduling": False,
            # a block's tokens change until they hold, so nobody else may share it
            "enable_prefix_caching": False,
        }
        given = {"block_size": 32, **(engine_args or {})}
        config = EngineArgs(model=model, **{**given, **own}).create_engine_config()
        # set here, not asked for: nothing drafts for this engine, and nothing is kept of what it decodes
        config.parallel_config.worker_cls = _WORKER
        config.scheduler_config.scheduler_cls = _SCHEDULER
        config.additional_config = {"spec_rollout": {"drafters": [], "budget": "off", "max_draft_tokens": MOST_NODES}}
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        scheduler = self.core.scheduler
        assert isinstance(scheduler, StreamScheduler)
        self.scheduler = scheduler
        self.vocab_size = config.model_config.get_vocab_size()
        self.max_requests = config.scheduler_config.max_num_seqs
        self.survival = Survival()
        self.drafted = 0
        self.work = Work()
        self._most_nodes = most_nodes
        self._most_tokens = config.model_config.max_model_len - 1

    @property
    def may_draft(self) -> bool:
        return self.scheduler.may_draft

    def meet(self, noise: NoiseKind) -> None:
        """What seeds of streams to come are; there are none now."""
        self.scheduler.noise = noise

    def take(self, message: Message) -> None:
        """What the verifier says."""
        match message:
            case Open():
                self._open(message)
            case Verdict():
                self._judge(message)
            case Close():
                self._close(str(message.handle))

    def close_all(self) -> None:
        """The verifier is another one, or gone."""
        for name in list(self.scheduler.streams):
            self._close(name)

    def step(self) -> list[Drafts]:
        """One pass for all streams that may draft; what is to be sent."""
        before = sum(stream.drafted for stream in self.scheduler.streams.values())
        if self.may_draft:
            self.core.step()
            self.work.passes += 1
            self.work.streams += len(self.scheduler.looked)
            self.work.rows += sum(self.scheduler.looked)
        streams = list(self.scheduler.streams.values())
        self.drafted += max(sum(stream.drafted for stream in streams) - before, 0)
        return [drafts for drafts in (stream.due() for stream in streams) if drafts is not None]

    def shutdown(self) -> None:
        self.core.shutdown()

    def _open(self, opened: Open) -> None:
        name = str(opened.handle)
        self._close(name)
        if len(opened.token_ids) > self._most_tokens or len(self.scheduler.streams) >= self.max_requests:
            return  # longer than this model can see, or one too many: the request goes on without its drafts
        noise = self.scheduler.noise.noise
        self.scheduler.streams[name] = Stream(opened, self._most_tokens, self._most_nodes, self.survival, noise)
        # it never samples: what it does is said by the stream
        params = SamplingParams(temperature=0.0, max_tokens=self._most_tokens, ignore_eos=True, detokenize=False)
        self.core.add_request(Request(name, opened.token_ids.tolist(), params, None))

    def _judge(self, verdict: Verdict) -> None:
        name = str(verdict.handle)
        stream = self.scheduler.streams.get(name)
        if stream is None:
            return
        if verdict.num_tokens > self._most_tokens:
            self._close(name)
            return
        if tokens := stream.take(verdict):
            self.scheduler.grow(name, tokens)
        self.scheduler.learn(stream)

    def _close(self, name: str) -> None:
        if name in self.scheduler.streams:
            self.scheduler.end(name)
