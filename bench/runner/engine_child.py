"""One vLLM engine in a process of its own, driven over a pipe. Run as a script, by path.

By path, because importing this project's package would patch vLLM: a stock engine must not even import it. So this file
may import the standard library and vLLM, and nothing of ours but the package itself, and that only for our engine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import random
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ONE_TOKEN = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}


class DrivenEngine:
    """Answers the operations named by its public methods; each takes and returns plain Python values."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine
        self._calls = _beside("worker_calls")

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens added."""
        tokenizer = self.llm.get_tokenizer()
        return [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def decode(self, token_ids: list[list[int]]) -> list[str]:
        """Text of each list of tokens, special tokens left out."""
        tokenizer = self.llm.get_tokenizer()
        return [tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids]

    def generate(self, prompts: list[list[int]], params: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Run all requests to their ends, from a cold prefix cache; or from what `prime` left in it.

        Requests that arrive on the way need VLLM_ENABLE_V1_MULTIPROCESSING=0: only then does the engine stand still
        between two steps, so that an arrival meets the same step in every run.

        Args:
            more: `is_warm`: leave the prefix cache as it is.
                `ids`: the requests' names; default: their numbers.
                `arrives_after`: per request, ascending: how many must have finished before it arrives.
                `reload_after`: once so many have finished, the weights are loaded anew from `folder`, while the clock
                stands still.
                `stats`: also answer the worker's totals of this run.

        Returns:
            token_ids and finish_s per request, step_s (end of each engine step), wall_s; all times in seconds since the
            first request could be scheduled.
        """
        if not more.pop("is_warm", False):
            self._forget_prefixes()
        result = self._run(prompts, params, **more)
        if more.get("arrives_after") is not None:
            # an empty step, which tells the worker of the last endings before anybody changes its policy
            self.core.step()
        return result

    def prime(self, prompts: list[list[int]]) -> None:
        """Compute these prompts into an empty prefix cache."""
        self._forget_prefixes()
        self._run(prompts, [_ONE_TOKEN] * len(prompts))

    def randomise(self, logit_std: float) -> int:
        """Replace all weights by random ones that make a lively model, equal in every process; returns a checksum.

        vLLM's own dummy weights (at most 0.001 each) are equal in every process too, but they make every logit almost
        0: noise alone would choose the tokens, and outputs would agree whatever attention computes. Needs
        VLLM_ALLOW_INSECURE_SERIALIZATION=1, since the function travels to the worker.
        """
        checksum = self.llm.collective_rpc(self._calls.randomise, args=(logit_std,))[0]
        self._forget_prefixes()
        return checksum

    def trace(
        self,
        prompts: list[list[int]],
        params: list[dict[str, Any]],
        at: int,
        joining: list[list[int]],
        own: dict[str, Any],
    ) -> dict[str, Any]:
        """As `generate(is_warm=True)`, with a look at the steps from `at` on: where their time goes.

        Args:
            joining: prompts that arrive at that step, each with the parameters `own`.

        Returns: as `worker_calls.end_trace`. Needs what `randomise` needs.
        """

        def between(step: int) -> None:
            if step == at:
                for i, prompt in enumerate(joining):
                    self._add(f"joins {i}", prompt, own)

        self.llm.collective_rpc(self._calls.start_trace)
        self._run(prompts, params, between=between)
        while self.core.has_unfinished_requests():
            self.core.step()
        found: dict[str, Any] = self.llm.collective_rpc(self._calls.end_trace, args=(at,))[0]
        return found

    def look(self, prompt: list[int], params: dict[str, Any], at: int, candidates: list[int]) -> dict[str, Any]:
        """What one request is answered up to position `at`, and what its candidates there are sampled from.

        Needs the arguments `ties.JUDGE`.

        Returns token_ids; logits, of each candidate; width, of the row that noise is added to; is_v2, the runner.
        """
        self._add("look", prompt, {**params, "max_tokens": at + 1, "logprobs": -1})
        output = None
        while self.core.has_unfinished_requests():
            output = next((one for one in self.core.step() if one.finished), output)
        assert output is not None
        answer = output.outputs[0]
        row = answer.logprobs[at] if len(answer.logprobs) > at else {}
        known = [row[token].logprob if token in row else float("-inf") for token in candidates]
        # as it was resolved: a GPU has the V2 runner without being told so
        is_v2 = bool(getattr(self.core.vllm_config, "use_v2_model_runner", False))
        return {"token_ids": list(answer.token_ids), "logits": known, "width": len(row), "is_v2": is_v2}

    def extend(
        self, prefixes: list[list[int]], num_tokens: list[int], repeats: int, seed: int
    ) -> dict[int, list[float]]:
        """Milliseconds of one step that appends n tokens to each of these (cached) prefixes, per n in `num_tokens`.

        The prefixes must fill whole KV cache blocks, so that the step computes the appended tokens and nothing else.
        """
        self.prime([[*prefix, prefix[0]] for prefix in prefixes])
        rng = random.Random(seed)
        times: dict[int, list[float]] = {n: [] for n in num_tokens}
        # one unmeasured pass: kernels set themselves up at the first sight of a shape
        for repeat in range(-1, repeats):
            for n in num_tokens:
                prompts = [[*prefix, *rng.choices(prefix, k=n)] for prefix in prefixes]
                params = [{**_ONE_TOKEN, "temperature": 1.0, "seed": i} for i in range(len(prompts))]
                result = self._run(prompts, params)
                if len(result["step_s"]) != 1:
                    raise RuntimeError(f"{len(prompts)} x {n} tokens took {len(result['step_s'])} steps instead of one")
                if repeat >= 0:
                    times[n].append(result["wall_s"] * 1e3)
        return times

    def reload(self, folder: str) -> None:
        """Replace the weights by those of the checkpoint in `folder`, of the same shape."""
        # not `model.load_weights`: on CPU, layers hold their weights packed, which only a reload undoes
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self._forget_prefixes()

    def trainer(self, function: str, **arguments: Any) -> Any:
        """What our package's function answers of this engine, as a trainer calls it; None where it does not apply."""
        import vllm_specrollout
        from vllm_specrollout.errors import UnsupportedError

        with contextlib.suppress(UnsupportedError):
            return getattr(vllm_specrollout, function)(self.llm, **arguments)
        return None

    def rpc(self, method: str, **arguments: Any) -> Any:
        """What the (first) worker answers to a method of its."""
        return self.llm.collective_rpc(method, kwargs=arguments)[0]

    def facts(self) -> dict[str, Any]:
        """What the (first) worker is made of. Needs what `randomise` needs."""
        return self.llm.collective_rpc(self._calls.facts)[0]

    def dtype(self) -> str:
        """Of the model, as it was resolved: `bfloat16`, for one."""
        return str(self.core.vllm_config.model_config.dtype).removeprefix("torch.")

    def block_size(self) -> int:
        return int(self.core.vllm_config.cache_config.block_size)

    def _forget_prefixes(self) -> None:
        # stock and ours may differ in block size, so what one would find in its cache the other might not
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: requests still hold blocks")

    def _run(
        self,
        prompts: list[list[int]],
        params: list[dict[str, Any]],
        *,
        stats: bool = False,
        ids: list[str] | None = None,
        arrives_after: list[int] | None = None,
        reload_after: int | None = None,
        folder: str = "",
        between: Callable[[int], None] = lambda step: None,
    ) -> dict[str, Any]:
        if stats:
            self.llm.collective_rpc("spec_rollout_stats", args=(True,))
        names = list(map(str, range(len(prompts)))) if ids is None else ids
        number = {name: i for i, name in enumerate(names)}
        token_ids: list[list[int]] = [[] for _ in prompts]
        finish_s, step_s = [0.0] * len(prompts), []
        waiting = deque(zip(arrives_after or [0] * len(prompts), names, prompts, params, strict=True))
        finished = 0
        if arrives_after is None:
            # paused while the requests arrive, so that every run schedules them in the same steps
            self.llm.sleep(level=0)
            while waiting:
                self._add(*waiting.popleft()[1:])
        begin = time.perf_counter()
        if arrives_after is None:
            self.llm.wake_up(tags=["scheduling"])
        while finished < len(prompts):
            while waiting and waiting[0][0] <= finished:
                self._add(*waiting.popleft()[1:])
            between(len(step_s))
            outputs = self.core.step()
            now = time.perf_counter() - begin
            step_s.append(now)
            for output in outputs:
                if output.finished and output.request_id in number:
                    i, finished = number[output.request_id], finished + 1
                    token_ids[i], finish_s[i] = list(output.outputs[0].token_ids), now
            if reload_after is not None and finished >= reload_after:
                reload_after, paused = None, time.perf_counter()
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
                begin += time.perf_counter() - paused
        result = {"token_ids": token_ids, "finish_s": finish_s, "step_s": step_s, "wall_s": step_s[-1]}
        if stats:
            result["totals"] = self.llm.collective_rpc("spec_rollout_stats", args=(True,))[0]
        return result

    def _add(self, name: str, prompt: list[int], values: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        if "structured_outputs" in values:
            values = {**values, "structured_outputs": StructuredOutputsParams(**values["structured_outputs"])}
        sampling = SamplingParams(**values, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        self.core.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def close(self) -> None:
        self.core.engine_core.shutdown()


def _beside(name: str) -> Any:
    """A module of this folder, by path, as all that is ours; workers get its functions by value, for want of a name."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(connection: Connection) -> None:
    """Build the engine that the first message describes, then answer one message after another until the pipe ends."""
    start = connection.recv()
    try:
        if start["is_ours"]:
            # its import is what makes `LLM(spec_rollout=...)` work
            importlib.import_module("vllm_specrollout")
        from vllm import LLM

        engine = DrivenEngine(LLM(**start["arguments"]))
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
        return
    connection.send({"result": None})
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (message := connection.recv()) is not None:
            operation, arguments = message
            try:
                connection.send({"result": getattr(engine, operation)(**arguments)})
            except Exception as error:
                connection.send({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
    engine.close()


# vLLM's workers are spawned, and import this file again under another name; or they are forked, and keep what is set
if __name__ in ("__main__", "__mp_main__"):
    # whoever finds this process hanging can ask where
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    interpreter = _beside("interpreter")
    if interpreter.is_asked_for():
        interpreter.prepare()
if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    # no worker may hold the pipe open after this process is gone
    os.set_inheritable(descriptor, False)
    serve(Connection(descriptor))
