"""Tables as files: they come back as they were, and whatever is wrong with one is told and named."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.schedules import TABLE, Collective, Layout
from mpiagg.tables import SEGMENT, Choice, Memory, Origin, Row, Settings, Spread, Table
from mpiagg.tables.files import BLOCK, MOST_FILE_BYTES, MOST_ROWS, read_table, table_of, text_of

ORIGIN = Origin(Layout(((0, 2), (1, 3))), "MPICH 5", {"cpu": "fast"})
SERVED = [(collective, name) for name, entry in TABLE.items() for collective in entry.schedules]
SEGMENTS = st.none() | st.integers(1, SEGMENT // BLOCK).map(lambda blocks: blocks * BLOCK)
SECONDS = st.floats(1e-9, 1e9)
TIMES = st.dictionaries(st.integers(0, 2**40), st.dictionaries(st.text(max_size=9), SECONDS, max_size=3), max_size=3)


@st.composite
def rows(draw):
    collective, name = draw(st.sampled_from(SERVED))
    spread, memory = draw(st.none() | st.sampled_from(Spread)), draw(st.none() | st.sampled_from(Memory))
    unregistered = None
    if (name, spread, memory) == ("shared", Spread.ONE_NODE, Memory.TOGETHER):
        unregistered = draw(st.none() | st.sampled_from([other for served, other in SERVED if served is collective]))
    return Row(
        collective,
        Choice(name, draw(st.integers(1, 64)), None, draw(SEGMENTS), unregistered),
        draw(st.none() | st.integers(0, 2**62)),
        draw(st.none() | st.integers(1, 2**24)),
        spread,
        memory,
        draw(TIMES),
    )


TABLES = st.builds(
    Table,
    st.just("t"),
    st.lists(rows(), max_size=5).map(tuple),
    st.none() | st.just(ORIGIN),
    st.none() | st.integers(1, 2**62),
)


@given(TABLES)
def test_tables_come_back_as_they_were(table):
    assert table_of("t", json.loads(text_of(table))) == table


def test_tables_that_choose_otherwise_have_other_digests():
    """Ranks compare them before they choose; a rank that chooses otherwise would hang the others."""
    row = table_of("t", CONTENT).rows[0]
    others = [
        dataclasses.replace(row, choice=row.choice._replace(**changes))
        for changes in (
            *({"algorithm": "direct", "unregistered": None}, {"lanes": 3}, {"segment": 8192}, {"segment": None}),
            *({"unregistered": "ring"}, {"unregistered": None}),
        )
    ]
    others += [
        dataclasses.replace(row, nbytes=7),
        dataclasses.replace(row, ranks=None),
        dataclasses.replace(row, memory=None, choice=row.choice._replace(unregistered=None)),
    ]
    digests = {Settings(Table("t", (each,))).digest for each in (row, *others)}
    digests |= {Settings(Table("t", (row,), piece_cost=cost)).digest for cost in (1, 2)}
    assert len(digests) == len(others) + 3


def test_files_come_back_as_they_were(tmp_path):
    table = Table(str(tmp_path / "t.json"), (Row(Collective.ALLREDUCE, Choice("ring", 2), 10),), ORIGIN)
    (tmp_path / "t.json").write_text(text_of(table))
    assert read_table(tmp_path / "t.json") == table
    assert Settings(table).digest == Settings(read_table(tmp_path / "t.json")).digest


ROW = {
    "collective": "allreduce",
    "bytes": 1024,
    "ranks": 4,
    "layout": "one node",
    "memory": "shared",
    "algorithm": "shared",
    "lanes": 2,
    "segment": 4096,
    "unregistered": "tree",
    "times": {"64": {"ring": 1e-6}},
}
CONTENT = {
    "format": "mpiagg tuning",
    "version": 2,
    "measured": {"nodes": [[0, 1], [2, 3]], "mpi": "MPICH 5", "machine": {}},
    "rows": [ROW],
}


def changed(**fields):
    """Return a file's content with another first row; None takes a field away."""
    row = {name: value for name, value in {**ROW, **fields}.items() if value is not None or name == "ranks"}
    return {**CONTENT, "rows": [ROW, row]}


NOWHERE = "unregistered is for algorithms that use shared memory, on one node with memory 'shared' - at `$.rows[1]`"
WRONG = [
    ([], "it must be an object with format, version; docs/tuning.md says what a table may have, and mpiagg tune"),
    ({**CONTENT, "format": "other"}, "format must be 'mpiagg tuning', not 'other'"),
    ({**CONTENT, "version": 1}, "version must be 2, not 1"),
    ({**CONTENT, "version": True}, "version must be 2, not True"),
    *(({**CONTENT, "piece_cost": cost}, "- at `$.piece_cost`") for cost in (0, -1, 1.5, True, "1", [], 2**63)),
    ({**CONTENT, "more": 1}, "unknown field `more`; docs/tuning.md"),
    ({"format": "mpiagg tuning", "version": 2}, "missing required field `measured`"),
    ({**CONTENT, "rows": {}}, "Expected `array`, got `object` - at `$.rows`"),
    ({**CONTENT, "rows": [ROW] * (MOST_ROWS + 1)}, "Expected `array` of length <= 10000 - at `$.rows`"),
    ({**CONTENT, "rows": [ROW, 5]}, "Expected `object`, got `int` - at `$.rows[1]`"),
    (changed(collective="alltoallw"), "Invalid enum value 'alltoallw' - at `$.rows[1].collective`"),
    (changed(collective=None), "missing required field `collective` - at `$.rows[1]`"),
    (changed(algorithm="rung"), "unknown algorithm 'rung'; known: ring, tree"),
    (changed(algorithm="native"), NOWHERE),
    (changed(library=""), "Expected `str` of length >= 1 - at `$.rows[1].library`"),
    (changed(library="x" * 81), "Expected `str` of length <= 80 - at `$.rows[1].library`"),
    (changed(library=5), "got `int` - at `$.rows[1].library`"),
    (changed(algorithm=["ring"]), "Expected `str`, got `array` - at `$.rows[1].algorithm`"),
    (changed(collective="broadcast", algorithm="circulant"), "algorithm 'circulant' does not serve broadcast"),
    (changed(bytes=-1), "Expected `int` >= 0 - at `$.rows[1].bytes`"),
    (changed(bytes=1e3), "got `float` - at `$.rows[1].bytes`"),
    (changed(ranks=0), "Expected `int` >= 1 - at `$.rows[1].ranks`"),
    (changed(layout="2 x 2"), "Invalid enum value '2 x 2' - at `$.rows[1].layout`"),
    (changed(memory=True), "got `bool` - at `$.rows[1].memory`"),
    (changed(lanes=0), "Expected `int` >= 1 - at `$.rows[1].lanes`"),
    (changed(lanes=65), "Expected `int` <= 64 - at `$.rows[1].lanes`"),
    (changed(segment=4097), "Expected `int` that's a multiple of 4096 - at `$.rows[1].segment`"),
    (changed(segment=0), "Expected `int` >= 4096 - at `$.rows[1].segment`"),
    (changed(segment=2 * SEGMENT), "Expected `int` <= 1048576 - at `$.rows[1].segment`"),
    (changed(algorithm="ring"), NOWHERE),
    (changed(layout="several ranks a node"), NOWHERE),
    (changed(memory=None), NOWHERE),
    (changed(unregistered="rung"), "unknown algorithm 'rung'"),
    (changed(collective="broadcast", unregistered="circulant"), "algorithm 'circulant' does not serve broadcast"),
    (changed(wire="fp16"), "unknown field `wire` - at `$.rows[1]`"),
    (changed(nbytes=1), "unknown field `nbytes` - at `$.rows[1]`"),
    (changed(times=[1]), "Expected `object`, got `array` - at `$.rows[1].times`"),
    *((changed(times={key: {}}), "- at `key` in `$.rows[1].times`") for key in ("x", "-1", "1.0", "1_0", str(2**63))),
    (changed(times={"1": {"ring": math.nan}}), "Expected `float` > 0.0 - at `$.rows[1].times[...][...]`"),
    (changed(times={"1": {"ring": 0}}), "Expected `float` > 0.0 - at `$.rows[1].times[...][...]`"),
    (changed(times={"1": {"ring": math.inf}}), "Expected `float` <= 1.79"),
    (changed(times={"1": {"ring": True}}), "Expected `float`, got `bool`"),
    (changed(times={"1": {"ring": "fast"}}), "Expected `float`, got `str`"),
    (changed(times={"1": {str(number): 1 for number in range(1001)}}), "Expected `object` of length <= 1000"),
    ({**CONTENT, "measured": {"nodes": [[0, 1]], "mpi": "MPICH"}}, "field `machine` - at `$.measured`"),
    *(
        ({**CONTENT, "measured": {"nodes": nodes, "mpi": "", "machine": {}}}, "- at `$.measured")
        for nodes in ([], [[]], [[0, 0]], [[1, 2]], [[1, 0]], [[1], [0]], [[0], []], [[0, True]], 5, [5], [[-1]])
    ),
    ({**CONTENT, "measured": {"nodes": [[0]], "mpi": 5, "machine": {}}}, "got `int` - at `$.measured.mpi`"),
]


@pytest.mark.parametrize(("content", "words"), WRONG)
def test_what_is_wrong_is_told_with_the_file_and_the_row(tmp_path, content, words):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as caught:
        read_table(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is not JSON"),
        (b"rows: []", "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"version": 1, "version": 1}', "a field is there twice"),
        (b'{"version": ' + b"1" * 10_000 + b"}", ""),
        (b" " * (MOST_FILE_BYTES + 1), "it has more than 16,777,216 bytes"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
def test_what_is_no_json_is_refused(tmp_path, data, words):
    path = tmp_path / "wrong.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"wrong\.json.*" + words):
        read_table(path)


@pytest.mark.parametrize(
    ("path", "words"),
    [("absent.json", "cannot be read: .*No such file"), (".", "it is no file"), ("a\0b", "null byte")],
)
def test_what_cannot_be_read_is_told(path, words):
    with pytest.raises(ValueError, match=words):
        read_table(Path(path))


def test_the_content_that_others_are_made_of_is_right():
    """A negative control of the tests above: they refuse for what was changed."""
    assert table_of("t", copy.deepcopy(CONTENT)).rows[0].choice == Choice("shared", 2, None, 4096, "tree")
    assert table_of("t", changed(ranks=None)).rows[1].ranks is None


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(list(ROW)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_nothing_else_than_an_error_comes_of_broken_tables(data):
    content = copy.deepcopy(CONTENT)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from([content, content["rows"][0], content["measured"]]))
        place[data.draw(st.sampled_from([*place, "other"]))] = data.draw(ANYTHING)
        if not isinstance(content.get("rows"), list) or not isinstance(content.get("measured"), dict):
            break
        if not content["rows"] or not isinstance(content["rows"][0], dict):
            break
    try:
        table = table_of("t", content)
    except ValueError:
        return
    assert table_of("t", json.loads(text_of(table))) == table  # what is accepted can be written


@given(ANYTHING)
def test_nothing_else_than_an_error_comes_of_anything(content):
    with pytest.raises(ValueError):
        table_of("t", content)
