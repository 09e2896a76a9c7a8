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
from mpiagg.tables.files import BLOCK, MOST_FILE_BYTES, MOST_ROWS, read_table, table_of, text_of, write_table

ORIGIN = Origin(Layout(((0, 2), (1, 3))), "MPICH 5", {"cpu": "fast"})
SERVED = [(collective, name) for name, entry in TABLE.items() for collective in entry.schedules]
SEGMENTS = st.none() | st.integers(1, SEGMENT // BLOCK).map(lambda blocks: blocks * BLOCK)
SECONDS = st.floats(1e-9, 1e9)
TIMES = st.dictionaries(st.integers(0, 2**40), st.dictionaries(st.text(max_size=9), SECONDS, max_size=3), max_size=3)


@st.composite
def rows(draw):
    collective, name = draw(st.sampled_from(SERVED))
    spread, memory = draw(st.none() | st.sampled_from(Spread)), draw(st.none() | st.sampled_from(Memory))
    elsewhere = None
    if (name, spread, memory) == ("shared", Spread.ONE_NODE, Memory.TOGETHER):
        elsewhere = draw(st.none() | st.sampled_from([other for served, other in SERVED if served is collective]))
    return Row(
        collective,
        Choice(name, draw(st.integers(1, 64)), None, draw(SEGMENTS), elsewhere),
        draw(st.none() | st.integers(0, 2**62)),
        draw(st.none() | st.integers(1, 2**24)),
        spread,
        memory,
        draw(TIMES),
    )


TABLES = st.builds(Table, st.just("t"), st.lists(rows(), max_size=5).map(tuple), st.none() | st.just(ORIGIN))


@given(TABLES)
def test_tables_come_back_as_they_were(table):
    assert table_of("t", json.loads(text_of(table))) == table


def test_tables_that_choose_otherwise_have_other_digests():
    """Ranks compare them before they choose; a rank that chooses otherwise would hang the others."""
    row = table_of("t", CONTENT).rows[0]
    others = [
        dataclasses.replace(row, choice=row.choice._replace(**changes))
        for changes in (
            *({"algorithm": "direct"}, {"lanes": 3}, {"segment": 8192}, {"segment": None}),
            *({"elsewhere": "ring"}, {"elsewhere": None}),
        )
    ]
    others += [
        dataclasses.replace(row, nbytes=7),
        dataclasses.replace(row, ranks=None),
        dataclasses.replace(row, memory=None),
    ]
    digests = {Settings(Table("t", (each,))).digest() for each in (row, *others)}
    assert len(digests) == len(others) + 1


def test_files_come_back_as_they_were(tmp_path):
    table = Table(str(tmp_path / "t.json"), (Row(Collective.ALLREDUCE, Choice("ring", 2), 10),), ORIGIN)
    write_table(tmp_path / "t.json", table)
    assert read_table(tmp_path / "t.json") == table
    assert Settings(table).digest() == Settings(read_table(tmp_path / "t.json")).digest()


ROW = {
    "collective": "allreduce",
    "bytes": 1024,
    "ranks": 4,
    "layout": "one node",
    "memory": "shared",
    "algorithm": "shared",
    "lanes": 2,
    "segment": 4096,
    "elsewhere": "tree",
    "times": {"64": {"ring": 1e-6}},
}
CONTENT = {
    "format": "mpiagg tuning",
    "version": 1,
    "measured": {"nodes": [[0, 1], [2, 3]], "mpi": "MPICH 5", "machine": {}},
    "rows": [ROW],
}


def changed(**fields):
    """Return a file's content with another first row; None takes a field away."""
    row = {name: value for name, value in {**ROW, **fields}.items() if value is not None or name == "ranks"}
    return {**CONTENT, "rows": [ROW, row]}


WRONG = [
    ([], "the file must be an object, not"),
    ({**CONTENT, "format": "other"}, "it must be of format 'mpiagg tuning', version 1; run: mpiagg tune"),
    ({**CONTENT, "version": 2}, "version 1; run: mpiagg tune"),
    ({**CONTENT, "version": True}, "version 1"),
    ({**CONTENT, "more": 1}, "unknown field 'more'; known: format, version, measured, rows"),
    ({"format": "mpiagg tuning", "version": 1}, "'measured' is missing"),
    ({**CONTENT, "rows": {}}, "rows must be a list of at most 10,000, not {}"),
    ({**CONTENT, "rows": [ROW] * (MOST_ROWS + 1)}, "rows must be a list of at most 10,000"),
    ({**CONTENT, "rows": [ROW, 5]}, "row 2: it must be an object, not 5"),
    (changed(collective="alltoall"), "row 2: collective must be one of allreduce, reduce, broadcast"),
    (changed(collective=None), "row 2: 'collective' is missing"),
    (changed(algorithm="rung"), "row 2: unknown algorithm 'rung'; known: ring, tree"),
    (changed(algorithm="native"), "row 2: elsewhere is for algorithms that use shared memory"),
    (changed(library=""), "row 2: library must be the name of an MPI library, not ''"),
    (changed(library=5), "row 2: library must be the name of an MPI library, not 5"),
    (changed(algorithm=["ring"]), "row 2: unknown algorithm"),
    (changed(collective="broadcast", algorithm="circulant"), "row 2: algorithm 'circulant' does not serve broadcast"),
    (changed(bytes=-1), "row 2: bytes must be an integer from 0 to"),
    (changed(bytes=1e3), "row 2: bytes must be an integer"),
    (changed(ranks=0), "row 2: ranks must be an integer from 1"),
    (changed(layout="2 x 2"), "row 2: layout must be one of one node, one rank a node, several ranks a node; not"),
    (changed(memory=True), "row 2: memory must be one of shared, messages; not True"),
    (changed(lanes=0), "row 2: lanes must be an integer from 1 to 64"),
    (changed(lanes=65), "row 2: lanes must be an integer from 1 to 64"),
    (changed(segment=4097), "row 2: segment must be a multiple of 4096, not 4097"),
    (changed(segment=2 * SEGMENT), "row 2: segment must be an integer from 4096 to"),
    (changed(algorithm="ring"), "row 2: elsewhere is for algorithms that use shared memory, on one node"),
    (changed(layout="several ranks a node"), "row 2: elsewhere is for algorithms that use shared memory, on one node"),
    (changed(memory=None), "row 2: elsewhere is for algorithms that use shared memory, on one node"),
    (changed(elsewhere="rung"), "row 2: unknown algorithm 'rung'"),
    (changed(collective="broadcast", elsewhere="circulant"), "row 2: algorithm 'circulant' does not serve broadcast"),
    (changed(wire="fp16"), "row 2: unknown field 'wire'"),
    (changed(times=[1]), "row 2: times must be an object"),
    (changed(times={"x": {}}), "row 2: times must be of lengths in bytes, not of 'x'"),
    (changed(times={"1": {"ring": math.nan}}), "row 2: time of 'ring' must be a positive number of seconds"),
    (changed(times={"1": {"ring": 0}}), "row 2: time of 'ring' must be a positive number of seconds"),
    (changed(times={"1": {"ring": "fast"}}), "row 2: time of 'ring' must be a positive number"),
    ({**CONTENT, "measured": {"nodes": [[0, 1]], "mpi": "MPICH"}}, "measured: 'machine' is missing"),
    *(
        ({**CONTENT, "measured": {"nodes": nodes, "mpi": "", "machine": {}}}, "measured: ")
        for nodes in ([], [[]], [[0, 0]], [[1, 2]], [[1, 0]], [[1], [0]], [[0], []], [[0, True]], 5, [5], [[-1]])
    ),
    ({**CONTENT, "measured": {"nodes": [[0]], "mpi": 5, "machine": {}}}, "measured: mpi must be a text"),
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
