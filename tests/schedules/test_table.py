"""The table and the words that schedules are written in."""

import pytest

from mpiagg.schedules import (
    TABLE,
    Collective,
    Round,
    algorithm,
    algorithms,
    check,
    count,
    finish,
    receive,
    reduce_from,
    schedules,
    send,
)


def test_the_names():
    assert algorithms() == (
        "ring",
        "tree",
        "parameter_server",
        "recursive_doubling",
        "halving_doubling",
        "circulant",
        "pat",
        "swing",
        "bine",
        "pairwise",
        "knomial",
        "recursive_multiplying",
        "multi_radix",
        "double_tree",
        "circulant_blocks",
        "bruck",
        "hierarchical_bruck",
        "direct",
        "one_shot",
        "shared",
        "hierarchical",
    )


TREES = ("bine", "knomial", "double_tree", "circulant_blocks")


@pytest.mark.parametrize(
    ("collective", "names"),
    [
        (
            "allreduce",
            tuple(
                name
                for name in algorithms()
                if name not in {"circulant_blocks", "pairwise", "bruck", "hierarchical_bruck"}
            ),
        ),
        ("reduce", ("ring", "tree", "parameter_server", *TREES, "direct", "one_shot", "shared")),
        ("broadcast", ("ring", "tree", "parameter_server", *TREES, "direct", "shared")),
        ("allgather", ("ring", "circulant", "pat", "swing", "multi_radix", "direct", "shared")),
        ("reduce_scatter", ("ring", "circulant", "pat", "swing", "multi_radix", "direct", "shared")),
        ("gather", ("knomial", "direct", "shared")),
        ("scatter", ("knomial", "direct", "shared")),
        ("alltoall", ("pairwise", "bruck", "hierarchical_bruck", "direct", "shared", "hierarchical")),
        ("scan", ("ring", "recursive_doubling")),
        ("exscan", ("ring", "recursive_doubling")),
    ],
)
def test_who_serves_what(collective, names):
    assert algorithms(collective) == algorithms(Collective(collective)) == names


@pytest.mark.parametrize("name", ["rung", "", None, 3, ["ring"]])
def test_an_unknown_name_lists_the_known(name):
    with pytest.raises(
        ValueError, match=r"^unknown algorithm .*; known: ring, tree, parameter_server, .*, hierarchical$"
    ):
        algorithm(name)


@pytest.mark.parametrize(
    "name",
    ["knomial-2", "knomial-7", "bruck-2", "bruck-7", "recursive_multiplying-3", "double_tree-1", "circulant_blocks-5"],
)
@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_a_number_behind_a_name_is_its_radix_or_how_many_blocks_there_are(name, n):
    kind, number = name.split("-")
    assert algorithm(name).name == name
    for collective in algorithm(name).schedules:
        check(name, collective, n, rounded=True)
        if kind in {"double_tree", "circulant_blocks"}:
            assert algorithm(name).chunks(collective, n) == int(number) * (2 if kind == "double_tree" else 1)
        elif n == 13 and kind != "bruck":
            rounds = [a_round for program in schedules(name, collective, n) for a_round in program]
            assert max(len(a_round.messages) for a_round in rounds) >= int(number) - 1
    assert name not in algorithms()


@pytest.mark.parametrize("name", ["multi_radix-4", "multi_radix-4x2x8", "multi_radix-2x2x2x2x2x2x2x2"])
def test_several_numbers_behind_a_name_are_a_factor_for_each_level(name):
    assert algorithm(name).name == name
    assert check(name, "allreduce", 24, rounded=True) == check(
        {"multi_radix-4": "multi_radix", "multi_radix-4x2x8": "multi_radix-4x2x3"}.get(name, "multi_radix-2x2x2x3"),
        "allreduce",
        24,
    )


@pytest.mark.parametrize(
    "number",
    ["", "02", "x", "-2", "²", "9" * 5000, "4x", "x4", "4xx4", "4x02", "4X2", "4x2" * 5000, "x".join("2" * 9)],
)
def test_a_number_that_is_none_is_unknown(number):
    for kind in ("knomial", "multi_radix", "ring", ""):
        with pytest.raises(ValueError, match=r"^unknown algorithm "):
            algorithm(f"{kind}-{number}")


@pytest.mark.parametrize(
    "name", ["knomial-1", "knomial-65", "double_tree-0", "double_tree-1025", "multi_radix-4x1", "multi_radix-1025x2"]
)
def test_a_number_out_of_range_is_refused(name):
    with pytest.raises(ValueError, match=r"^the number in .* must be from "):
        algorithm(name)


@pytest.mark.parametrize("name", TABLE)
def test_an_algorithm_says_who_else_serves_what_it_does_not(name):
    for collective in set(Collective) - set(TABLE[name].schedules):
        with pytest.raises(
            ValueError,
            match=f"^algorithm '{name}' does not serve {collective.value}; these do: {algorithms(collective)[0]}, ",
        ):
            TABLE[name].schedule(collective, 0, 2)


@pytest.mark.parametrize("name", TABLE)
def test_entries_are_named_after_themselves_and_say_what_they_need(name):
    assert TABLE[name].name == name
    assert "scratch" in TABLE[name].needs


def test_peers_and_chunks_are_settled():
    for name, entry in TABLE.items():
        for collective in entry.schedules:
            for rank, program in enumerate(schedules(name, collective, 7, root=3 if collective.rooted else 0)):
                for step in (step for a_round in program for step in a_round):
                    assert 0 <= step.chunk < step.chunk + step.count <= entry.chunks(collective, 7)
                    if step.action.local:
                        assert step.peer == -1
                    else:
                        assert step.peer in set(range(7)) - {rank}


def test_another_root_turns_the_ranks():
    zero = schedules("parameter_server", Collective.BROADCAST, 4)
    two = schedules("parameter_server", Collective.BROADCAST, 4, root=2)
    assert [step.peer for step in zero[0][0]] == [1, 2, 3]
    assert [step.peer for step in two[2][0]] == [3, 0, 1]


def test_one_rank_alone_sends_nothing():
    for name, entry in TABLE.items():
        for collective in entry.schedules:
            (program,) = schedules(name, collective, 1)
            assert count(program).rounds == 0


def test_rounds_tell_messages_from_computation():
    a_round = Round(send(1), finish(), receive(2), reduce_from(3))
    assert a_round.messages == ((send(1),), (receive(2),), (reduce_from(3),))


def test_what_goes_to_one_rank_in_a_round_is_one_message():
    a_round = Round(send(1), receive(1), send(2), send(1, 3), finish(), reduce_from(1, 4))
    assert a_round.messages == ((send(1), send(1, 3)), (receive(1), reduce_from(1, 4)), (send(2),))


def test_which_collectives_reduce_and_which_have_a_root():
    assert {c.value for c in Collective if c.reduces} == {
        "allreduce",
        "reduce",
        "reduce_scatter",
        "scan",
        "exscan",
    }
    assert {c.value for c in Collective if c.rooted} == {"reduce", "broadcast", "gather", "scatter"}
