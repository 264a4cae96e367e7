"""How an answer that ends at a stop string is told from a request that its client takes back."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.scheduling.stop_strings import answers, mark, marked

names = st.one_of(st.text(), st.builds(mark, st.text(), st.integers(0, 1 << 40)))


@given(st.dictionaries(names, st.integers(0, 1 << 40), max_size=5), st.lists(st.text(), max_size=3))
def test_each_request_with_a_mark_is_an_answer_of_that_length_and_no_other_is(lengths, aborted) -> None:
    requests = {*lengths, *aborted}
    marks = [mark(name, length) for name, length in lengths.items()]
    if not requests & set(marks):
        assert answers([*aborted, *lengths, *marks], requests) == lengths
    assert [marked(one) for one in marks] == list(lengths)


def test_a_request_whose_name_looks_like_a_mark_is_a_request() -> None:
    name = mark("other", 3)
    assert answers([name], {name}) == {}
    assert answers([name, mark(name, 5)], {name, "other"}) == {name: 5}


def test_what_only_begins_like_a_mark_is_none() -> None:
    for name in ("spec_rollout_answer:", "spec_rollout_answer:-1:a", f"spec_rollout_answer:{'9' * 5000}:a", "a"):
        assert marked(name) == "" and answers([name], ()) == {}
