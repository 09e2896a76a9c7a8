"""Recordings as torch's flight recorder has them: what each entry says, and what is left out."""

import pytest
from click.testing import CliRunner

from mpiagg.cli import main
from mpiagg.watch import flight_recorder
from mpiagg.watch.recordings import recording_of

CHANNEL = "00deadbeef001234"


def operation(order, **fields):
    return {
        "channel": CHANNEL,
        "order": order,
        "what": "allreduce by ring",
        "collective": "allreduce",
        "nbytes": 8,
        "start": 100 * order,
        "end": 100 * order + 10,
        "state": "done",
        "thread": "MainThread",
        "rounds": [],
        "data": {"dtype": "float32", "sent": 2, "received": 2, "even": True},
        **fields,
    }


def recording(rank, *operations, entered=None, ranks=(0, 1), **fields):
    return recording_of(
        {
            "format": "mpiagg recording",
            "version": 1,
            "rank": rank,
            "size": 2,
            "host": "node0",
            "pid": 7,
            "boot": "b",
            "clock_ns": 1000,
            "wall_ns": 5000,
            "reason": "asked",
            "dropped": 0,
            "operations": list(operations),
            "communicators": []
            if entered is None
            else [{"channel": CHANNEL, "label": "0:default_pg", "ranks": ranks, "entered": entered}],
            **fields,
        }
    )


def orders(found):
    return {rank: [each["collective_seq_id"] for each in one["entries"]] for rank, one in found.items()}


def test_an_entry_has_what_torch_knows_of_a_collective():
    found = flight_recorder.flight_records([recording(0, operation(1), entered=1), recording(1, entered=0)])
    assert found[0]["version"] == "2.10"
    assert found[0]["pg_config"] == {"comm 0": {"name": "comm 0", "desc": "0:default_pg", "ranks": "[0, 1]"}}
    assert found[1]["pg_config"] == found[0]["pg_config"]
    (entry,) = found[0]["entries"]
    assert entry["process_group"] == ("comm 0", "0:default_pg")
    assert (entry["profiling_name"], entry["state"], entry["time_created_ns"]) == ("nccl:all_reduce", "completed", 4100)
    assert (entry["input_sizes"], entry["output_sizes"], entry["input_dtypes"]) == ([[2]], [[2]], ["float32"])
    assert entry["frames"] == [{"name": "allreduce by ring (done)", "filename": "operation", "line": 1}]


@pytest.mark.parametrize(
    ("fields", "name", "sizes"),
    [
        ({"caller": "barrier"}, "barrier", ([[2]], [[2]])),
        ({"collective": "scan"}, "coalesced", ([[2]], [[2]])),
        ({"collective": None, "data": None}, "coalesced", ([[]], [[]])),
        (
            {"collective": "broadcast", "data": {"dtype": "int8", "sent": None, "received": 5, "even": True}},
            "broadcast",
            ([[5]], [[5]]),
        ),
        (
            {"collective": "allgather", "data": {"dtype": "int8", "sent": 1, "received": 5, "even": False}},
            "all_gather_v",
            ([[]], [[5]]),
        ),
        ({"collective": "allgather", "caller": "_all_gather_base"}, "_all_gather_base", ([[2]], [[2]])),
        ({"collective": "allgather", "caller": "all_reduce"}, "all_gather", ([[2]], [[2]])),
    ],
)
def test_names_are_those_that_torch_has(fields, name, sizes):
    (entry,) = flight_recorder.flight_records([recording(0, operation(1, **fields))])[0]["entries"]
    assert entry["profiling_name"] == f"nccl:{name}"
    assert (entry["input_sizes"], entry["output_sizes"]) == sizes


def test_what_a_rank_no_longer_keeps_is_left_out_on_all_and_what_it_has_missed_is_not():
    first = recording(0, *map(operation, range(1, 5)), entered=4)
    second = recording(1, operation(3), entered=3)
    assert orders(flight_recorder.flight_records([first, second])) == {0: [3, 4], 1: [3]}
    missed = recording(1, entered=0)
    assert orders(flight_recorder.flight_records([first, missed])) == {0: [1, 2, 3, 4], 1: []}
    running = operation(4, state="running", end=None)
    found = flight_recorder.flight_records([recording(0, operation(3), running, entered=4), second])
    assert [each["state"] for each in found[0]["entries"]] == ["completed", "started"]
    assert found[0]["pg_status"]["comm 0"] == {
        "last_completed_collective": "3",
        "last_enqueued_collective": "4",
        "last_started_collective": "4",
    }


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "old").touch()
    with pytest.raises(ValueError, match="is not empty; torchfrtrace takes every file"):
        flight_recorder.write([recording(0, operation(1))], tmp_path)
    done = CliRunner().invoke(main, ["trace", str(tmp_path), "--torch", str(tmp_path)])
    assert done.exit_code
