"""Two runs are compared token by token, and the first difference is told."""

from bench.runner.runs import Run, WorkerTotals, first_difference


def test_equal_outputs_do_not_differ(make_run):
    assert first_difference(make_run([[1, 2], [3]], [1.0]), make_run([[1, 2], [3]], [9.0])) is None


def test_the_first_differing_token_of_the_first_differing_request_is_named(make_run):
    found = first_difference(make_run([[1], [2, 3, 4], [5]], [1.0]), make_run([[1], [2, 9, 4], [6]], [1.0]))
    assert found.as_text() == "request 1, token 1: stock 3, ours 9 (2 requests differ)"


def test_an_output_that_ends_early_differs_where_it_ends(make_run):
    found = first_difference(make_run([[1, 2]], [1.0]), make_run([[1]], [1.0]))
    assert (found.position, found.stock, found.ours) == (1, 2, None)


def test_decoding_time_leaves_out_the_step_of_the_prompts(make_run):
    run = make_run([[1, 2, 3]], [0.5, 0.6, 0.8])
    assert run.wall_s == 0.8
    assert round(run.decode_s, 9) == 0.3
    assert [round(ms) for ms in run.step_ms()] == [100, 200]


def test_what_the_worker_counts_beyond_our_fields_is_ignored():
    names = [name for name in WorkerTotals.__dataclass_fields__ if name != "by_rows"]
    stats = {**dict.fromkeys(names, 2), "by_rows": {4: [3, 1.5]}, "shape": "tree", "newer": 1}
    reply = {"token_ids": [[1]], "finish_s": [1.0], "step_s": [1.0], "wall_s": 1.0, "stats": stats}
    totals = Run.from_child(reply).totals
    assert totals.by_rows == {4: (3, 1.5)}
    assert totals.steps == 2
