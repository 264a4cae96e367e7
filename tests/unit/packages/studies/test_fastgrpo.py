import msgspec
import pytest
from vllm_specrollout.bench.studies.fastgrpo import DATASETS, PRINTED, FastGrpoInputs, chained, gained, generation, run

INPUTS = FastGrpoInputs()
REPORT = run(INPUTS, 0)


def test_shorter_chains_accept_less_and_the_whole_one_what_was_given():
    assert chained(4.55, 8, 8) == pytest.approx(4.55, abs=1e-6)
    assert 1.0 == chained(4.55, 8, 0) < chained(4.55, 8, 3) < 4.55


def test_trees_of_the_products_budget_are_smaller_for_larger_batches_and_gain_less():
    speeds = [gained(INPUTS, batch, 4.55) for batch in (1, 8, 32)]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > 1.0
    assert gained(msgspec.structs.replace(INPUTS, c_peak=32), 32, 4.55) == 1.0, "no rows are left below the knee"
    assert gained(INPUTS, 32, 4.55, sized_for=1) < 1.0, "trees for one request cost 32 more than they bring"


def test_without_a_spread_early_termination_gains_nothing():
    found = generation(msgspec.structs.replace(INPUTS, batches=4), 0.0, 0)
    assert found["early termination"] == pytest.approx(1.0)


def test_fitted_cells_are_the_papers_and_marked():
    cells = {row[0]: row[1:] for row in REPORT.tables[0].rows}
    assert set(cells) == set(PRINTED)
    marked = [(name, i) for name, row in cells.items() for i, cell in enumerate(row) if str(cell).endswith("*")]
    assert len(marked) == 7
    for dataset in DATASETS:
        assert REPORT.figures[f"early termination {dataset}"] == pytest.approx(1.0, abs=0.01)
    assert REPORT.figures["without online learning SimpleRL"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("dataset", DATASETS[1:])
def test_where_answers_differ_as_the_text_says_the_whole_method_is_within_15_percent(dataset):
    assert REPORT.figures[f"FastGRPO {dataset}"] == pytest.approx(1.0, abs=0.15)
    assert REPORT.figures[f"without online learning {dataset}"] == pytest.approx(1.0, abs=0.15)
