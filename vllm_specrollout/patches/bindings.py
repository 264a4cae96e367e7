"""Where we reach into vLLM's objects at run time: what `Patch` does not cover, because it is no name of a module.

What belongs here: every object of vLLM's that we change, and why no public way does. A test looks for others.
"""

from __future__ import annotations

from vllm_specrollout.patches.binding import Binding
from vllm_specrollout.patches.bindings_v2 import BINDINGS_V2

BINDINGS = (
    Binding(
        "wrap",
        "layers[name].impl",
        "worker/v1/cpu_runner.py",
        "branches go through stock attention as paths; a layer's implementation cannot be chosen by a plugin",
    ),
    Binding(
        "wrap",
        "model.load_weights",
        "worker/weights_version.py",
        "trainers call it directly: drafts must know that weights changed, and on CPU it fails once they are packed",
    ),
    Binding(
        "swap",
        "info.load_numel",
        "worker/packed_weights.py",
        "a layer that got a part of its weights: reloading then gives it back the old ones",
    ),
    Binding(
        "wrap",
        "setattr(self, ...)",
        "worker/weights_version.py",
        "a worker's methods that may bring weights, by their names: weights are looked at after each call",
    ),
    Binding(
        "swap",
        "self.sampler.topk_topp_sampler",
        "worker/v1/runner.py",
        "the same arithmetic with the noise given: that of each token's position",
    ),
    Binding(
        "swap",
        "self.speculative_config",
        "worker/v1/runner.py",
        "set for one call, which makes logits rows for drafts; else vLLM's runner would draft and verify itself",
    ),
    Binding(
        "swap",
        "self.input_batch.logitsprocs",
        "worker/v1/runner.py",
        "where a model drafts, vLLM leaves out processors that its own verification does not know",
    ),
    Binding(
        "rebind",
        "proposer._sample_draft_tokens",
        "worker/v1/proposer.py",
        "draft tokens are drawn with the target's noise, and alternatives kept",
    ),
    Binding(
        "swap",
        "self.use_aux_hidden_state_outputs",
        "worker/v1/collecting.py",
        "vLLM hands out the layers' hidden states only where an EAGLE-3 head is loaded",
    ),
    Binding(
        "swap",
        "owner._modules[name]",
        "worker/models/swapping.py",
        "while weights are loaded into a head: vLLM's reloading empties every module, the target's shared ones too",
    ),
    Binding(
        "swap",
        "self.structured_output_manager.vllm_config",
        "worker/scheduler.py",
        "grammar bitmasks are made with a row per draft token only where a configuration speculates",
    ),
    Binding(
        "swap",
        "self.running",
        "worker/streams/scheduler.py",
        "streams that may not draft further keep their blocks, and are left out of a pass",
    ),
    Binding(
        "swap",
        "request.spec_token_ids",
        "worker/scheduler.py",
        "drafts are cut to the KV slots that nobody else needs",
    ),
    Binding(
        "swap",
        "request.sampling_params",
        "worker/arriving.py",
        "an unseeded request gets a seed of ours, and workers learn whose answer it is, in a copy of its parameters",
    ),
    Binding(
        "swap",
        "scheduler_config.scheduler_cls",
        "server/engine_args.py",
        "vLLM's own way to name a scheduler, set on the finished configuration",
    ),
    Binding(
        "swap",
        "compilation.cudagraph_capture_sizes",
        "server/engine_args.py",
        "rows of drafts need larger graphs than rows of requests",
    ),
    Binding("swap", "request.prompt_token_ids", "worker/arriving.py", "it ends where the answer so far begins"),
    Binding("swap", "request.num_prompt_tokens", "worker/arriving.py", "the same"),
    Binding("swap", "request.sampling_params", "worker/arriving.py", "limits of the whole answer, in a copy"),
    Binding("swap", "request.max_tokens", "worker/arriving.py", "the same"),
    Binding("swap", "request.prefill_stats", "worker/arriving.py", "vLLM would hold that a prompt caches no answer"),
    Binding(
        "swap",
        "request.skip_reading_prefix_cache",
        "worker/arriving.py",
        "beside a KV connector, which holds that no more is cached than the prompt",
    ),
    Binding(
        "piggyback",
        "new.prefill_token_ids",
        "worker/arriving.py",
        "the answer so far; vLLM fills the field for its V2 runner alone",
    ),
    Binding("piggyback", "setattr(output, ...)", "worker/arriving.py", "which new requests were begun elsewhere"),
    Binding(
        "piggyback",
        "setattr(output, ...)",
        "worker/scheduler.py",
        "on `SchedulerOutput`, what only the scheduler knows: how requests ended, how many wait, the step's number, and"
        " that weights may have been written",
    ),
    Binding(
        "piggyback",
        "getattr(stats, features.installed().counts_field)",
        "worker/scheduler.py",
        "a worker's counts, on the one open table of numbers in `SchedulerStats`",
    ),
    Binding(
        "swap",
        "config.parallel_config.worker_cls",
        "worker/streams/engine.py",
        "an engine that drafts has our worker; spec rollout itself is off there, so no flag may ask for it",
    ),
    Binding(
        "swap",
        "config.scheduler_config.scheduler_cls",
        "worker/streams/engine.py",
        "its requests are streams, which grow by verdicts alone",
    ),
    Binding(
        "swap",
        "config.additional_config",
        "worker/streams/engine.py",
        "room for branches in the KV cache, and no drafters of its own",
    ),
    Binding(
        "swap",
        "request.spec_token_ids",
        "worker/streams/scheduler.py",
        "a stream's tree travels as draft tokens, which nobody verifies there",
    ),
    Binding(
        "swap",
        "request.num_computed_tokens",
        "worker/streams/scheduler.py",
        "nothing that was drafted is kept: the next pass begins at the last token that holds",
    ),
    Binding(
        "piggyback",
        "setattr(output, _STEP, step)",
        "worker/streams/scheduler.py",
        "the workers learn which trees a pass computes, and whose noise chooses",
    ),
    Binding(
        "swap",
        "output.new_logprobs",
        "server/wrappers.py",
        "before vLLM 0.32: tokens behind a stop string are dropped, and their logprobs with them",
    ),
    Binding(
        "piggyback",
        "setattr(state, ...)",
        "server/endpoints.py",
        "the engine's client, on the state of vLLM's web application, for our endpoints",
    ),
    Binding(
        "swap",
        "request.spec_decode_metrics",
        "worker/scheduler.py",
        "vLLM's has a place for as many accepted tokens as its `speculative_config` says: none",
    ),
    Binding(
        "swap",
        "self.spec_decode_metrics_level",
        "worker/scheduler.py",
        "the option `--per-request-spec-decode-metrics`, which vLLM drops where it has no `speculative_config`",
    ),
    *BINDINGS_V2,
)
