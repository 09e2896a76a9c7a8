"""What a caller's words mean, what the environment says, and that the simulation follows it."""

import numpy as np
import pytest

import mpiagg
from mpiagg.plans.choices import NATIVE, Case, Memory, choose, pick
from mpiagg.schedules import Collective, Layout
from mpiagg.tables import Choice, Row, Table, settings
from mpiagg.tables.files import text_of
from mpiagg.tables.settings import Settings

CASE = Case(Collective.ALLREDUCE, 2**20, Layout.of([1, 1, 1, 1]))
LEFT_TO_RIGHT = [[2.0**60], [-(2.0**60)], [1.0], [2.0**-40]]
"""Every order of summation gives these another sum."""


@pytest.fixture(autouse=True)
def nothing_set(environment):
    """Start with the default, whatever the environment of these tests says."""
    environment()


def test_auto_is_the_table():
    assert pick("auto", None, CASE) == choose(CASE) == Choice("ring")
    assert pick("auto", 3, CASE) == Choice("ring", 3)
    assert pick("auto", None, CASE, "fp16") == Choice("ring", 1, "fp16")
    assert pick("auto", None, CASE, "u8") == Choice("direct", 1, "u8")
    assert pick("auto", None, CASE._replace(layout=Layout.of([4]))) == Choice("shared")
    assert pick("auto", None, CASE._replace(layout=Layout.of([4])), "fp16").algorithm == "ring"
    assert pick("tree", None, CASE) == Choice("tree")
    assert pick(NATIVE, None, CASE) == Choice(NATIVE)


def test_a_table_from_the_environment_is_used(environment, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(text_of(Table("", (Row(Collective.ALLREDUCE, Choice("tree", 2), 2**20),))))
    environment(MPIAGG_TUNING=path)
    assert choose(CASE) == Choice("tree", 2)
    assert choose(CASE._replace(nbytes=2**20 + 1)) == Settings().found(CASE._replace(nbytes=2**20 + 1)).choice
    assert choose(CASE._replace(collective=Collective.REDUCE)).algorithm == "double_tree"


@pytest.mark.parametrize(("wire", "shorter"), [("bf16", 2), ("fp16", 2), ("u8", 4)])
def test_a_wire_takes_what_is_best_for_as_many_bytes_as_are_sent(environment, tmp_path, wire, shorter):
    path = tmp_path / "table.json"
    rows = [Row(Collective.ALLREDUCE, Choice("ring", lanes), 4096 * lanes) for lanes in (1, 2, 4, 8)]
    path.write_text(text_of(Table("", (*rows, Row(Collective.ALLREDUCE, Choice("ring", 16))))))
    environment(MPIAGG_TUNING=path)
    for lanes in (4, 8):
        case = CASE._replace(nbytes=4096 * lanes - 1024)
        assert pick("auto", None, case).lanes == lanes
        assert pick("auto", None, case, wire).lanes == lanes // shorter
        assert pick("auto", 3, case, wire).lanes == 3
        assert pick("ring" if shorter == 2 else "direct", None, case, wire).lanes == 1


def test_an_algorithm_is_forced_where_it_serves(environment):
    environment(MPIAGG_ALGORITHM="recursive_doubling")
    for memory in Memory:
        assert choose(CASE._replace(memory=memory)) == Choice("recursive_doubling")
    assert choose(CASE._replace(collective=Collective.BROADCAST)).algorithm == "double_tree"
    assert pick("tree", None, CASE) == Choice("tree")  # who names an algorithm gets it
    assert pick("auto", None, CASE, "u8") == Choice("direct", 1, "u8")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MPIAGG_ALGORITHM": "rung"}, "MPIAGG_ALGORITHM: unknown algorithm 'rung'; known: ring, "),
        ({"MPIAGG_ALGORITHM": "native"}, "MPIAGG_ALGORITHM: unknown algorithm 'native'"),
        ({"MPIAGG_TUNING": "/absent.json"}, "tuning table '/absent.json': it cannot be read"),
    ],
)
def test_what_the_environment_says_is_checked(environment, variables, words):
    environment(**variables)
    with pytest.raises(ValueError) as caught:
        choose(CASE)
    assert words in str(caught.value)


def test_empty_variables_say_nothing(environment):
    environment(MPIAGG_ALGORITHM="", MPIAGG_TUNING="")
    assert settings() == Settings()


def test_the_simulation_follows(environment, tmp_path):
    def simulated(algorithm="auto"):
        return mpiagg.simulate(LEFT_TO_RIGHT, algorithm=algorithm)[0]

    assert np.array_equal(simulated(), simulated("shared"))
    assert simulated("tree") != simulated("shared")  # else the rest shows nothing
    environment(MPIAGG_ALGORITHM="tree")
    assert simulated() == simulated("tree")
    (tmp_path / "t.json").write_text(text_of(Table("", (Row(Collective.ALLREDUCE, Choice("tree")),))))
    environment(MPIAGG_TUNING=tmp_path / "t.json")
    assert simulated() == simulated("tree")


# -- which layouts a table is for


def measured_on(layout):
    from mpiagg.tables import Origin

    return Settings(Table("t.json", (), Origin(layout, "MPICH", {})))


@pytest.mark.parametrize(
    ("layout", "ranks", "words"),
    [
        (Layout.of([4]), 4, "t.json' was measured on another layout: 2 x 2, and this job is 1 x 4; measure one for it"),
        (None, 8, "another layout: 2 x 2, and this job is 8 ranks"),
        (Layout(((0, 2), (1, 3))), 4, "layout: 2 x 2 (0,1 2,3), and this job is 2 x 2 (0,2 1,3)"),
    ],
)
def test_a_table_for_another_layout_is_refused(layout, ranks, words):
    with pytest.raises(ValueError) as caught:
        measured_on(Layout.of([2, 2])).check(layout, ranks)
    assert words in str(caught.value)


def test_a_table_for_this_layout_is_not_refused():
    measured_on(Layout.of([2, 2])).check(Layout.of([2, 2]), 4)
    measured_on(Layout.of([2, 2])).check(None, 4)
    Settings(Table("for all", ())).check(Layout.of([2, 2]), 4)
    Settings().check(Layout.of([2, 2]), 4)


def test_digests_tell_settings_apart():
    row = Row(Collective.ALLREDUCE, Choice("tree"))
    all_settings = [Settings(), Settings(forced="ring"), Settings(forced="tree"), Settings(Table("", (row,)))]
    all_settings.append(Settings(Table("", (row,)), "ring"))
    assert len({settings.digest for settings in all_settings}) == len(all_settings)
    assert Settings(Table("a", (row,))).digest == Settings(Table("b", (row,))).digest  # a name decides nothing
