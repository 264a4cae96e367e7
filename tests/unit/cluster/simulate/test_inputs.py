import pytest

from vllm_specrollout.cluster.simulate.inputs import FOLDER, MARKS, load, read
from vllm_specrollout.cluster.simulate.registry import STUDIES, run_study
from vllm_specrollout.errors import ConfigError

GOOD = (
    'title = "t"\n[inputs.a]\nvalue = 1\nmark = "text"\nsource = "s"\n'
    '[targets.b]\nvalue = [[1, 2], [3]]\nsource = "s"\n'
)


def written(tmp_path, text):
    path = tmp_path / "inputs.toml"
    path.write_text(text)
    return path


def test_every_study_has_a_file_of_inputs_and_every_file_a_study():
    assert sorted(path.stem for path in FOLDER.glob("*.toml")) == sorted(STUDIES)


@pytest.mark.parametrize("study", STUDIES)
def test_every_shipped_value_says_where_it_comes_from(study):
    inputs = load(study)
    for given in inputs.inputs.values():
        assert given.mark in MARKS and given.source
        assert given.mark == "text" or given.how
    for target in inputs.targets.values():
        assert target.source and not target.mark


def test_values_are_read_as_numbers_lists_and_tables(tmp_path):
    inputs = read(written(tmp_path, GOOD))
    assert inputs.number("a") == 1.0
    assert inputs.target_table("b") == ((1.0, 2.0), (3.0,))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('mark = "text"', 'mark = "guess"', "`mark of a` names 'guess', which does not exist"),
        ('mark = "text"', 'mark = "free"', "`a` in .* is `free` and has no `how`"),
        ('mark = "text"', 'mark = "text"\nfrom = "x"', "`a` in .* names 'from'"),
        ('mark = "text"\n', "", "`a` in .* has no `mark`"),
        ("value = 1\n", 'value = "1"\n', "holds '1'"),
        ("value = 1\n", "value = true\n", "holds True"),
        ("value = 1\n", "value = nan\n", "holds nan"),
        ("value = 1\n", "value = []\n", r"holds \[\]"),
        ('source = "s"\n[t', 'source = ""\n[t', "`source` of .* is ''"),
        ('title = "t"', "title = 1", "has no `title`"),
        ("[targets.b]", "[target.b]", "names 'target'"),
        ("[inputs.a]", "[inputs.a", "is no TOML file that can be read"),
    ],
)
def test_a_file_that_breaks_the_schema_is_refused_with_a_hint(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(written(tmp_path, GOOD.replace(old, new, 1)))
    assert "\n\nhint: " in str(caught.value)


def test_a_list_is_no_number_and_a_number_no_list(tmp_path):
    inputs = read(written(tmp_path, GOOD))
    with pytest.raises(ConfigError, match="`a` in .* is one number"):
        inputs.numbers("a")
    with pytest.raises(ConfigError, match="`b` in .* is a list"):
        inputs.target("b")
    with pytest.raises(ConfigError, match="lacks `c`"):
        inputs.number("c")


def test_a_file_of_ones_own_has_the_names_of_the_shipped_one(tmp_path):
    shipped = (FOLDER / "tlt-cycles.toml").read_text()
    path = written(tmp_path, shipped.replace("plain_ms", "plane_ms"))
    with pytest.raises(ConfigError, match="plane_ms"):
        run_study("tlt-cycles", inputs=path)
    path = written(tmp_path, shipped.replace("value = 4.1304", "value = 8.2608"))
    own, known = run_study("tlt-cycles", inputs=path), run_study("tlt-cycles")
    assert own.figures["plain_ms"] == 2 * known.figures["plain_ms"]


def test_a_missing_file_and_an_unknown_study_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no TOML file that can be read"):
        load("tlt-cycles", tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="`STUDY` names 'tlt-table-5'"):
        run_study("tlt-table-5")


def test_values_that_no_study_can_use_are_the_users_mistake(tmp_path):
    shipped = (FOLDER / "tlt-cycles.toml").read_text()
    path = written(tmp_path, shipped.replace("value = 12.0453", "value = 0.0"))
    with pytest.raises(ConfigError, match="cannot be simulated: float division by zero"):
        run_study("tlt-cycles", inputs=path)
