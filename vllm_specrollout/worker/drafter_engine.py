"""A vLLM engine that drafts: any that decodes, asked by nothing but vLLM's own calls for adding and aborting requests.

A draft is a resumed request: it has the target's seed, so it draws with the target's noise. The V2 runner counts noise
by position, so there the answer so far is a longer prompt; the V1 runner draws it in order, so there this plugin takes
the request up where its answer stands.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

from vllm_specrollout.cluster.line import Ask
from vllm_specrollout.cluster.messages import Sampling
from vllm_specrollout.cluster.serving import Grown
from vllm_specrollout.worker.profiling import device_of

# on V1 it takes up answers, and drafts nothing itself
_OFF = {"spec_rollout": {"drafters": ["ngram"], "budget": "off"}}
_LOG_PROBS = 8
"""Of the likeliest tokens: as many as a fan-out may have."""


class DrafterEngine:
    """
    Args:
        model: its folder or name.
        engine_args: further arguments of vLLM's engine.
        takes_up: whether it runs on the V1 runner, with this plugin.
    """

    def __init__(self, model: str, engine_args: Mapping[str, Any] | None = None, *, takes_up: bool = True) -> None:
        given: dict[str, Any] = {"enable_prefix_caching": True, "disable_log_stats": True, **(engine_args or {})}
        own: dict[str, Any] = {"skip_tokenizer_init": True, "async_scheduling": False}
        if takes_up:
            # a prompt in chunks rewinds the noise of stock vLLM, which is an error on CPU
            own |= {"additional_config": _OFF, "enable_chunked_prefill": False}
        args = EngineArgs(model=model, **{**given, **own})
        if args.max_model_len is not None:
            # the target's, whose requests may be longer than any that this model can read
            own_length = replace(args, max_model_len=None).create_model_config().max_model_len
            args.max_model_len = min(args.max_model_len, own_length)
        self.llm = LLMEngine.from_engine_args(args)
        config = self.llm.vllm_config
        self.model = config.model_config.model
        self.device = f"{config.device_config.device_type}: {device_of(config)}"
        self.vocab_size = config.model_config.get_vocab_size()
        self.max_requests = config.scheduler_config.max_num_seqs
        self.most_tokens = config.model_config.max_model_len - 1
        self._takes_up, self._has_sleep = takes_up, config.model_config.enable_sleep_mode
        self._warm_up()

    def _warm_up(self) -> None:
        """What vLLM imports, allocates and compiles for its first request takes longer than many steps of a target."""
        for name, seed in (("warm", 0), ("up", None)):
            sampling = Sampling(1.0, seed=seed)
            self.add(Ask(name, [0] * 2, 1, 2, sampling.has_noise), sampling)
        while self.llm.has_unfinished_requests():
            self.llm.step()

    def add(self, ask: Ask, sampling: Sampling) -> None:
        noise: dict[str, Any] = {"temperature": 0.0}
        if ask.is_drawn:
            noise = {
                "seed": sampling.seed,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
            }
            answer = len(ask.token_ids) - ask.prompt_tokens
            if self._takes_up and answer:
                resume = {"prompt_tokens": ask.prompt_tokens, "answer_tokens": answer}
                noise["extra_args"] = {"spec_rollout": {"resume": resume}}
        params = SamplingParams(
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=_LOG_PROBS,
            output_kind=RequestOutputKind.DELTA,
            **noise,
        )
        self.llm.add_request(ask.name, {"prompt_token_ids": ask.token_ids}, params)

    def abort(self, names: Sequence[str]) -> None:
        self.llm.abort_request(list(names))

    def step(self) -> list[Grown]:
        found = []
        for output in self.llm.step():
            one = output.outputs[0]
            for i, (token, known) in enumerate(zip(one.token_ids, one.logprobs or (), strict=True)):
                is_over = output.finished and i == len(one.token_ids) - 1
                found.append(_grown(output.request_id, token, known, is_over))
        return found

    def sleep(self) -> None:
        """Give memory back, all but the weights; on GPUs those go to the host. It has no requests."""
        if self._has_sleep:
            self.llm.sleep(1)
        else:
            # vLLM has no such allocator on cores: the kernel takes the pages of the KV cache, and what it held is gone
            self.llm.reset_prefix_cache()
            self.llm.collective_rpc(_give_pages_back)

    def wake(self) -> None:
        if self._has_sleep:
            self.llm.wake_up()  # on cores, pages come back as they are written to

    def shutdown(self) -> None:
        self.llm.engine_core.shutdown()


def _grown(name: str, token: int, known: Mapping[int, Any], is_over: bool) -> Grown:
    likeliest = sorted(known, key=lambda one: -known[one].logprob)
    tokens = [token, *(one for one in likeliest if one != token)]
    return Grown(name, tokens, [known[one].logprob for one in tokens], likeliest[0], is_over)


def _give_pages_back(worker: Any) -> None:
    """Of the KV cache; and what the heap has free, as of the last requests."""
    libc = ctypes.CDLL(None, use_errno=True)
    caches = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in worker.model_runner.kv_caches}
    for begin, cache in caches.items():
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = (begin + cache.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if cache.device.type == "cpu" and whole > 0:
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
