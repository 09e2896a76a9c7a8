"""Rows, the first that fits, and the default table: complete, and what the model says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.schedules import Collective, Layout, algorithm
from mpiagg.tables import Case, Choice, Memory, Row, Settings, Spread, Table
from mpiagg.tables.files import text_of
from mpiagg.tables.predicted import LENGTHS, RANKS, Prices, derived
from mpiagg.tables.settings import DEFAULT_FILE, default_table

LAYOUTS = st.lists(st.integers(1, 9), min_size=1, max_size=9).map(Layout.of) | st.integers(1, 5000).map(
    lambda ranks: Layout.by_name(range(ranks))
)
LIBRARIES = st.sampled_from([None, "MPICH", "Open MPI", "another"])
CASES = st.builds(
    Case,
    *(st.sampled_from(Collective), st.integers(0, 2**50), LAYOUTS, st.sampled_from(Memory), LIBRARIES),
    learned=st.none(),
)


def first_fit(case, *tables):
    """Say again what is taken: the first row that fits."""
    for table in tables:
        for row in table.rows:
            if (
                row.collective is case.collective
                and (row.nbytes is None or case.nbytes <= row.nbytes)
                and (row.ranks is None or case.layout.size <= row.ranks)
                and (row.spread is None or row.spread is Spread.of(case.layout))
                and (row.memory is None or row.memory is case.memory)
                and (row.library is None or row.library == case.library)
                and (case.library is not None or "native" not in (row.choice.algorithm, row.choice.unregistered))
            ):
                return row.choice
    return None


@pytest.mark.parametrize(
    ("sizes", "spread"),
    [
        ([1], Spread.ONE_NODE),
        ([8], Spread.ONE_NODE),
        ([1, 1], Spread.ONE_EACH),
        ([2, 1], Spread.SEVERAL),
        ([1, 1, 3], Spread.SEVERAL),
    ],
)
def test_ranks_are_spread_in_three_ways(sizes, spread):
    assert Spread.of(Layout.of(sizes)) is spread


@given(CASES)
def test_the_default_has_a_choice_for_every_case(case):
    choice = first_fit(case, default_table())
    assert choice is not None
    if choice.algorithm == "native":
        assert case.library is not None
    else:
        assert case.collective in algorithm(choice.algorithm).schedules
    assert Settings().found(case).choice == choice


ROWS = st.builds(
    Row,
    st.just(Collective.ALLREDUCE),
    st.builds(Choice, st.sampled_from(["ring", "tree", "native"]), st.integers(1, 3)),
    st.none() | st.integers(0, 100),
    st.none() | st.integers(1, 9),
    st.none() | st.sampled_from(Spread),
    st.none() | st.sampled_from(Memory),
    library=st.none() | LIBRARIES,
)
FEW = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(Layout.of)


@given(
    st.lists(ROWS, max_size=8),
    st.builds(
        Case,
        *(st.just(Collective.ALLREDUCE), st.integers(0, 110), FEW, st.sampled_from(Memory), LIBRARIES),
        learned=st.none(),
    ),
)
def test_the_first_row_that_fits_is_taken_and_the_default_has_the_rest(rows, case):
    table = Table("a test's", tuple(rows))
    settings = Settings(table)
    for _ in range(2):  # the second time from what is remembered
        found = settings.found(case)
        assert Settings().found(case._replace(learned=table)).choice == found.choice  # what was learned does as much
        assert found.choice == first_fit(case, table, default_table())
        assert found.table.rows[found.number] is found.row


def test_a_row_that_comes_first_hides_others():
    every, short = Row(Collective.ALLREDUCE, Choice("tree")), Row(Collective.ALLREDUCE, Choice("ring"), 100)
    case = Case(Collective.ALLREDUCE, 10, Layout.of([2]))
    assert Settings(Table("", (every, short))).found(case).choice.algorithm == "tree"
    assert Settings(Table("", (short, every))).found(case).choice.algorithm == "ring"
    assert Settings(Table("", (short, every))).found(case._replace(nbytes=101)).choice.algorithm == "tree"


@given(CASES, st.sampled_from(["ring", "tree", "recursive_doubling"]))
def test_a_forced_algorithm_is_taken_where_it_serves(case, name):
    choice = Settings(forced=name).found(case).choice
    assert choice == (Choice(name) if case.collective in algorithm(name).schedules else Settings().found(case).choice)


def test_a_trial_ends():
    settings, case = Settings(), Case(Collective.ALLREDUCE, 10, Layout.of([2]))
    usual = settings.found(case)
    with settings.trying(case, Choice("tree")):
        assert settings.found(case).choice.algorithm == "tree"
        assert settings.found(case._replace(layout=Layout.of([1, 1]))).choice.algorithm != "tree"
    assert settings.found(case) == usual


def test_rows_and_choices_are_said_in_words():
    row = Row(Collective.ALLREDUCE, Choice("ring", 2), 16384, 8, Spread.ONE_EACH, Memory.NONE)
    words = "allreduce, up to 16,384 bytes, up to 8 ranks, one rank a node, memory: messages: ring, 2 lanes"
    assert str(row) == words
    assert str(Row(Collective.REDUCE, Choice("shared", segment=4096, unregistered="tree"))) == (
        "reduce, always: shared, segments of 4096 bytes, in other memory tree"
    )


# -- the default table and the model


@pytest.mark.thorough
def test_the_default_table_is_derived_from_the_model():
    assert DEFAULT_FILE.read_text() == text_of(derived()), "run: python docs/make_tuning.py"


def test_the_default_is_what_was_measured_to_be_best():
    def takes(nbytes, *sizes, collective=Collective.ALLREDUCE, memory=Memory.TOGETHER):
        return str(Settings().found(Case(collective, nbytes, Layout.of(sizes), memory)).choice)

    for collective in (c for c in Collective if not c.prefix):
        longest = 2**20 if collective.reduces else 2**16
        for ranks in (2, 3, 8, 64):
            for nbytes in (0, 64, longest):
                assert takes(nbytes, ranks, collective=collective) == "shared"
            mailed = ranks <= {Collective.ALLREDUCE: 4, Collective.REDUCE: 2}.get(collective, 0)  # whatever the length
            assert takes(2**26, ranks, collective=collective) == f"shared{', in other memory read' * (not mailed)}"
    assert [takes(nbytes, 1, 1, 1, 1) for nbytes in (64, 2**14, 2**16, 2**20, 2**22)] == [
        *("recursive_doubling", "recursive_doubling", "circulant", "ring", "ring, 4 lanes"),
    ]
    # Messages have 128 KiB at least.
    assert [takes(nbytes, 1, 1) for nbytes in (2**20, 2**21, 2**23)] == [
        f"ring{lanes}" for lanes in (", 2 lanes", ", 4 lanes", ", 4 lanes")
    ]
    assert takes(2**22, 1, 1, 1, 1, collective=Collective.ALLTOALL) == "pairwise, 4 lanes"
    assert [takes(nbytes, 2, 2) for nbytes in (2**20, 2**22, 2**25)] == [
        f"halving_doubling{lanes}" for lanes in ("", ", 4 lanes", ", 4 lanes")
    ]
    assert takes(1024, 2, 2) == "recursive_doubling"
    assert [takes(2**20, *sizes) for sizes in ((2, 2), (3, 2), (4, 4))] == [
        *("halving_doubling", "hierarchical", "hierarchical"),
    ]
    assert takes(2**20, 2, memory=Memory.NONE) == "ring"


@pytest.mark.parametrize(
    ("library", "sizes", "native"),
    [
        ("MPICH", [1, 1, 1, 1], 2**21),
        ("MPICH", [2, 2], 2**21),
        ("MPICH", [2] * 8, 2**21),
        ("Open MPI", [1, 1, 1, 1], 2**19),
        ("Open MPI", [2, 2, 2, 2], 2**19),
        ("Open MPI", [1] * 9, 2**21),
        ("Open MPI", [1, 1], None),
        ("MPICH", [1] * 17, None),
        ("Open MPI", [4] * 5, None),
        ("Intel MPI", [2, 2], None),
    ],
)
def test_long_all_to_alls_between_few_ranks_are_ours(library, sizes, native):
    for nbytes in (2**16, 2**19, 2**19 + 1, 2**21, 2**21 + 1, 2**30):
        case = Case(Collective.ALLTOALL, nbytes, Layout.of(sizes), library=library)
        wanted = "native" if native is None or nbytes <= native else "pairwise, 2 lanes"
        assert str(Settings().found(case).choice) == wanted


@pytest.mark.parametrize("collective", Collective)
@pytest.mark.parametrize("layout", [Layout.of([4]), Layout.of([1] * 6), Layout.of([3, 3])], ids=str)
def test_what_the_default_takes_is_nearly_the_cheapest(collective, layout):
    """Where a row is for several numbers of ranks, none of them pays twice the least for the others."""
    for memory in Memory:
        prices = Prices(collective, layout, memory)
        for power in range(6, 31, 3):
            found = Settings().found(Case(collective, 2**power, layout, memory)).choice
            cheapest = min(prices.seconds(2**power).values())
            priced = found if collective.prefix else found._replace(lanes=1)
            assert prices.seconds(2**power)[priced._replace(unregistered=None)] < 2 * cheapest
            assert found.unregistered is None or found.reads


def test_ranges_are_ascending():
    assert list(LENGTHS) == sorted(set(LENGTHS))
    assert list(RANKS) == sorted(set(RANKS))
