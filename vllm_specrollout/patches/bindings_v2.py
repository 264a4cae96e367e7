"""The part of `bindings.py` that concerns the V2 runner."""

from __future__ import annotations

from vllm_specrollout.patches.binding import Binding

BINDINGS_V2 = (
    Binding(
        "rebind",
        "setattr(module, class_name, ...)",
        "worker/v2/worker.py",
        "vLLM's worker imports its V2 runner by name; the name is ours during `init_device`, and vLLM's again after it",
    ),
    Binding(
        "wrap",
        "layer.impl",
        "worker/v2/attention.py",
        "rows of draft trees go to the tree kernel, all others to stock attention",
    ),
    Binding(
        "wrap",
        "self.structured_outputs_worker",
        "worker/v2/runner.py",
        "grammar masks have a row per draft, where vLLM counts on its own speculation's rows",
    ),
    Binding(
        "wrap",
        "output.model_runner_output",
        "worker/v2/runner.py",
        "an asynchronous output is made by vLLM; ours carries the report on drafts as well",
    ),
    Binding(
        "swap",
        "self.speculator",
        "worker/v2/proposer.py",
        "vLLM loads a model that drafts and gives it KV cache; in a step it must not run it by itself",
    ),
    Binding(
        "swap",
        "self.use_aux_hidden_state_outputs",
        "worker/v2/proposer.py",
        "the layers' hidden states, for an EAGLE-3 head",
    ),
    Binding(
        "rebind",
        "speculator.sample_draft",
        "worker/v2/proposer.py",
        "draft tokens are drawn with the target's own noise, unsalted, and any level may be the last",
    ),
    Binding(
        "swap",
        "speculator.draft_max_seq_len",
        "worker/v2/proposer.py",
        "rows are laid out in the speculator's own buffers, and its passes run on them",
    ),
    Binding(
        "swap",
        "speculator.num_speculative_steps",
        "worker/v2/proposer.py",
        "while it drafts: a small model's loop asks for no number of levels",
    ),
    Binding(
        "swap",
        "self.num_lookahead_tokens",
        "worker/v2/scheduler.py",
        "room for keys and values of what a model only drafts",
    ),
    Binding(
        "swap",
        "self.decode_query_len",
        "worker/v2/runner.py",
        "for one call: vLLM sizes a request's logits rows by it",
    ),
    Binding(
        "swap",
        "request.spec_token_ids",
        "worker/v2/scheduler.py",
        "placeholders: room for drafts that the worker makes after the step was scheduled",
    ),
    Binding(
        "swap",
        "runner.cudagraph_manager",
        "worker/v2/graphs.py",
        "while graphs of steps with drafts are captured: vLLM captures by its manager",
    ),
    Binding(
        "swap",
        "self.req_states.draft_tokens",
        "worker/v2/runner.py",
        "vLLM makes the buffer only for its own speculation",
    ),
    Binding(
        "swap",
        "batch.max_query_len",
        "worker/v2/runner.py",
        "a step's own batch: its drafts are fewer than the room that was scheduled",
    ),
    Binding(
        "wrap",
        "connector.prepare_output",
        "worker/v2/commit.py",
        "vLLM keeps a step's routing by its rows, and asks nobody which rows of a tree were accepted",
    ),
    Binding(
        "swap",
        "pending.token_starts",
        "worker/v2/commit.py",
        "where rows begin is the device's to say: scheduled ahead, vLLM takes room that stayed empty for computed",
    ),
    Binding(
        "swap",
        "scheduler_output.num_invalid_spec_tokens",
        "worker/v2/scheduler.py",
        "vLLM counts placeholders as a request's drafts, but for those that it is told were invalid",
    ),
)
