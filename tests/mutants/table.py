"""Which tests must notice which fault: each of them has to fail in an engine that has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

IDENTITY = "tests/e2e/identity"
FEATURES = f"{IDENTITY}/test_engine_features.py"
ABORTED = f"{FEATURES}::test_aborted_requests_leave_the_others_alone_and_nothing_behind"
AUTO = f"{FEATURES}::test_the_ngram_drafter_and_the_auto_budget_yield_stocks_tokens"
ONE_BY_ONE = f"{FEATURES}::test_requests_one_at_a_time_yield_stocks_tokens"
MIXES = f"{IDENTITY}/test_mixes.py"
MIXED = f"{MIXES}::test_random_requests_are_answered_as_by_stock_in_every_field"
UNITED = f"{IDENTITY}/test_identity.py::test_the_united_trees_of_several_drafters_yield_stocks_tokens"
EVERY_FEATURE = f"{IDENTITY}/test_identity.py::test_every_feature_yields_stocks_tokens_whatever_is_drafted"
RESUMED = f"{IDENTITY}/test_resumed.py::test_a_resumed_request_may_be_preempted_and_prefilled_in_pieces"
PARTS_AND_BUDGETS = f"{IDENTITY}/test_parts_and_budgets.py"
MODELS = f"{IDENTITY}/test_models_that_draft.py"
SWAPPED = f"{IDENTITY}/test_swapped_drafters.py"
COPY = f"{MODELS}::test_a_copy_of_the_target_is_met_at_every_position"
HISTORY = (
    "tests/e2e/test_hostile_history.py::test_an_engine_over_a_poisoned_directory_answers_as_stock_and_keeps_its_own"
)
V2 = "tests/v2/test_identity.py"
AHEAD = f"{V2}::test_drafts_made_after_scheduling_ahead_yield_stocks_tokens"
ON_DEVICE = "tests/integration/test_v2_device_drafts.py"
SEVERAL_DIMENSIONS = (
    "tests/{}/test_multimodal.py::test_positions_of_several_dimensions_follow_the_drafts_and_the_tokens_are_stocks"
)
WITHHELD = "tests/e2e/test_withheld.py"
REFUSAL, NO_DRAFTS = "a call is refused", "what it is about goes without drafts"


@dataclass(frozen=True)
class Mutant:
    """A fault of `site/mutated.py`, by its name."""

    name: str
    # files, or tests in them, all of whose tests must fail, but for those left out
    tests: Sequence[str]
    # test -> why it may pass
    left_out: Mapping[str, str] = field(default_factory=dict)


MUTANTS = (
    Mutant(
        "always paused",
        (IDENTITY,),
        {
            f"{IDENTITY}/test_compare.py": "has no engine",
            f"{IDENTITY}/test_ties.py": "has stock's engine alone",
            f"{MIXES}::test_every_parameter_of_vllms_is_drawn_or_left_out_with_a_reason": "has no engine",
            f"{MIXES}::test_beams_are_stocks": "nothing is drafted for requests of one token",
            f"{MIXES}::test_those_that_wait_begin_in_the_order_of_their_priorities": "is about who waits",
            f"{IDENTITY}/test_decoupled.py::test_bad_calls_are_answered_with_their_cause_and_change_nothing": REFUSAL,
            f"{IDENTITY}/test_learning.py::test_learning_is_refused_where_no_head_learns": REFUSAL,
            f"{SWAPPED}::test_a_head_with_an_output_head_of_its_own_may_not_leave_it_out": REFUSAL,
            f"{SWAPPED}::test_an_engine_without_a_model_that_drafts_refuses": REFUSAL,
            f"{SWAPPED}::test_a_drafter_written_off_before_a_swap_is_half_believed_after_it": NO_DRAFTS,
        },
    ),
    Mutant(
        "always paused, V2 runner",
        (
            AHEAD,
            f"{V2}::test_lora_adapters_and_the_base_model_mix_in_one_batch",
            "tests/v2/test_resumed.py",
        ),
    ),
    Mutant("drafted rows have the noise of the next position, V2 runner", (AHEAD,)),
    Mutant("the verifier accepts one draft too many, V2 runner", (AHEAD,)),
    # tokens are the right ones all the same, but the host compares what it was not to have, and ranks differ
    Mutant(
        "the row of a withheld verdict is not clamped",
        (
            "tests/integration/test_ranks_apart.py"
            "::test_on_v2_a_verdict_that_the_first_rank_withholds_is_withheld_on_all_of_them",
            "tests/integration/test_v2_verify.py"
            "::test_who_is_withheld_gets_its_first_token_alone_and_the_others_stand_behind_it",
        ),
    ),
    # these cost speed alone, so answers say nothing of them
    Mutant(
        "lookups read another request's text",
        (f"{ON_DEVICE}::test_a_lookup_is_told_where_a_request_its_problem_and_its_siblings_are",),
    ),
    Mutant(
        "lines are followed whatever came since",
        (
            f"{ON_DEVICE}::test_a_line_goes_on_where_what_came_since_is_its_own[another token came]",
            f"{ON_DEVICE}::test_a_line_goes_on_where_what_came_since_is_its_own[and then another]",
            f"{ON_DEVICE}::test_a_request_has_no_draft_of_the_one_that_had_its_row",
        ),
    ),
    Mutant(
        "a row keeps the drafts of who had it before",
        (
            f"{ON_DEVICE}::test_a_request_has_no_draft_of_the_one_that_had_its_row",
            f"{ON_DEVICE}::test_a_paused_engine_drafts_nothing_and_leaves_nothing_of_what_was",
        ),
    ),
    Mutant("drafters silent", (ABORTED, ONE_BY_ONE, RESUMED, MIXED)),
    Mutant("budget off", (ABORTED, ONE_BY_ONE, RESUMED, MIXED)),
    Mutant("budget `auto` never pays", (AUTO,)),
    Mutant(
        "a model's drafts are lost",
        (COPY, f"{MODELS}::test_a_model_drafts_for_prompts_that_come_in_chunks_as_engines_are_shipped"),
    ),
    Mutant("the history's drafts are lost", (HISTORY,)),
    Mutant("end tokens are drafted", (f"{PARTS_AND_BUDGETS}::test_every_part_of_a_session_is_stocks_and_drafted_for",)),
    Mutant(
        "a session keeps its first part's limits",
        (f"{PARTS_AND_BUDGETS}::test_every_part_of_a_session_is_stocks_and_drafted_for",),
    ),
    Mutant(
        "budgets are left out beside drafts",
        (f"{PARTS_AND_BUDGETS}::test_budgets_end_the_thinking_beside_drafts_and_nobody_elses",),
    ),
    Mutant("the verifier steps into a wrong sibling", (ABORTED, UNITED)),
    Mutant("the verifier accepts one token too many", (ABORTED, ONE_BY_ONE, RESUMED)),
    Mutant("the bonus token is the root row's", (ABORTED, ONE_BY_ONE, COPY)),
    Mutant("no KV block moves to its request", (ABORTED, UNITED)),
    Mutant("drafted rows have the noise of the next position", (ABORTED, UNITED, RESUMED, MIXED)),
    Mutant("scratch blocks are not copied", (ABORTED, UNITED)),
    Mutant("drafted rows are at the next position", (ABORTED, UNITED)),
    Mutant("M-RoPE's positions follow the rows", (SEVERAL_DIMENSIONS.format("e2e/identity"),)),
    Mutant("M-RoPE's positions follow the rows, V2 runner", (SEVERAL_DIMENSIONS.format("v2"),)),
    Mutant("drafted rows have their parents' grammar masks", (f"{EVERY_FEATURE}[llama-float32]",)),
    Mutant(
        "withheld verdicts are never compared",
        (
            f"{WITHHELD}::test_answers_are_stocks_though_many_verdicts_are_withheld",
            f"{WITHHELD}::test_noise_of_the_wrong_position_is_noticed_and_then_nothing_is_drafted",
        ),
    ),
)
