"""The check refuses what is not a correct collective, and says where."""

import pytest
from thorough import thorough

from mpiagg.errors import ScheduleError
from mpiagg.schedules import TABLE, Collective, Round, check, finish, prove, receive, reduce_from, schedules, send
from mpiagg.schedules.check import _Expressions


def refused(programs, collective="allreduce", chunks=1, root=0):
    with pytest.raises(ScheduleError) as caught:
        prove(programs, Collective(collective), chunks, root)
    return caught.value


def place(error):
    return error.rank, error.round, error.chunk


def left_fold_of_two():
    """A correct all-reduce of two ranks: rank 0 adds and sends back."""
    return [
        [Round(reduce_from(1, received_first=False)), Round(finish()), Round(send(1))],
        [Round(send(0)), Round(receive(0))],
    ]


def test_the_correct_one_passes():
    prove(left_fold_of_two(), Collective.ALLREDUCE, 1)


def test_deadlock_of_sends_before_receives():
    # Both ranks send first and receive in a round of its own: right only with buffering.
    programs = [[Round(send(1 - rank)), Round(reduce_from(1 - rank)), Round(finish())] for rank in range(2)]
    error = refused(programs)
    assert str(error) == (
        "deadlock: 2 of 2 ranks can never go on: "
        "rank 0 in round 0 waits to send chunk 0 to rank 1, which is in round 0; "
        "rank 1 in round 0 waits to send chunk 0 to rank 0, which is in round 0"
    )
    assert place(error) == (0, 0, 0)


def test_deadlock_of_receives_before_sends_names_at_most_eight():
    n = 10
    programs = [[Round(receive(rank - 1 if rank else n - 1)), Round(send((rank + 1) % n))] for rank in range(n)]
    error = refused(programs)
    assert "10 of 10 ranks" in str(error)
    assert "waits to receive chunk 0 from rank 9, which is in round 0" in str(error)
    assert str(error).endswith("; and 2 more")


def test_unmatched_message():
    programs = left_fold_of_two()
    programs[1].append(Round(send(0)))
    error = refused(programs)
    assert "rank 1 in round 2 waits to send chunk 0 to rank 0, which has finished: the message is unmatched" in str(
        error
    )
    assert place(error) == (1, 2, 0)


def test_unmatched_receive():
    programs = left_fold_of_two()
    programs[0].append(Round(receive(1)))
    error = refused(programs)
    assert "rank 0 in round 3 waits to receive chunk 0 from rank 1, which has finished" in str(error)
    assert place(error) == (0, 3, 0)


@pytest.mark.parametrize("peer", [2, -1])
def test_peer_that_does_not_exist(peer):
    programs = left_fold_of_two()
    programs[1].append(Round(send(peer)))
    error = refused(programs)
    assert f"to rank {peer}, which does not exist" in str(error)
    assert place(error) == (1, 2, 0)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (receive(0, chunk=1), "sends chunk 0, but rank 1 in round 0 expects chunk 1"),
        (receive(0, chunk=0, count=2), "sends chunk 0, but rank 1 in round 0 expects chunks 0 to 1"),
    ],
)
def test_mismatched_chunks(step, words):
    error = refused([[Round(send(1, chunk=0))], [Round(step)]], "broadcast", chunks=2)
    assert str(error) == f"mismatched message: rank 0 in round 0 {words}"
    assert place(error) == (1, 0, step.chunk)


@pytest.mark.parametrize(("chunk", "count", "named"), [(1, 1, "chunk 1"), (-1, 1, "chunk -1"), (0, 2, "chunks 0 to 1")])
def test_chunk_out_of_range(chunk, count, named):
    error = refused([[Round(send(1, chunk, count))], [Round(receive(0, chunk, count))]], "broadcast", chunks=1)
    assert str(error) == f"rank 0 in round 0 names {named} of 1"
    assert place(error) == (0, 0, chunk)


def test_no_chunks_at_all():
    assert "names" in str(refused([[Round(send(1, 0, 0))], [Round(receive(0, 0, 0))]], "broadcast", chunks=1))


def exchange(*steps):
    """Two ranks that do the same to each other."""
    return [[Round(*(make(1 - rank) for make in steps))] for rank in range(2)]


@pytest.mark.parametrize(
    ("steps", "use"),
    [
        ((send, receive), "being sent"),
        ((receive, send), "being sent"),
        ((send, receive, receive), "being sent"),
        ((receive, receive), "being received already"),
        ((reduce_from, receive), "being reduced"),
        ((receive, reduce_from), "being reduced"),
        ((lambda _: finish(), receive), "being finished"),
        ((receive, lambda _: finish()), "being finished"),
    ],
)
def test_receive_into_a_chunk_in_use(steps, use):
    error = refused(exchange(*steps))
    assert str(error) == f"rank 0 in round 0 receives into chunk 0, which is {use}"
    assert place(error) == (0, 0, 0)


def test_receive_into_one_of_several_chunks_in_use():
    programs = [[], [Round(send(0, chunk=0, count=3), receive(0, chunk=2, count=2))]]
    assert place(refused(programs, chunks=4)) == (1, 0, 2)


def ring_of_one_round_too_many(n):
    """A reduce-scatter whose partial sums go all the way round to where they set out."""
    return [
        [
            *(
                Round(send((rank + 1) % n, (rank - s) % n), reduce_from((rank - 1) % n, (rank - s - 1) % n))
                for s in range(n)
            ),
            Round(finish(rank)),
        ]
        for rank in range(n)
    ]


def test_rank_counted_twice():
    error = refused(ring_of_one_round_too_many(4), "reduce_scatter", chunks=4)
    assert str(error) == f"rank {error.rank} in round 3, chunk {error.chunk}: counts rank {error.rank} twice"
    assert error.round == 3


def test_rank_missing_at_the_end():
    # Rank 2 takes part in nothing but the result, and nobody finishes.
    programs = [
        [Round(reduce_from(1)), Round(send(1), send(2))],
        [Round(send(0)), Round(receive(0))],
        [Round(receive(0))],
    ]
    error = refused(programs)
    assert str(error) == "rank 0 ends without the contribution of rank 2 in chunk 0"
    assert place(error) == (0, None, 0)


def test_finished_too_early():
    programs = [[Round(finish()), Round(send(1), reduce_from(1))], [Round(send(0), reduce_from(0)), Round(finish())]]
    error = refused(programs)
    assert str(error) == "rank 0 in round 0, chunk 0: finished without rank 1"
    assert place(error) == (0, 0, 0)


def test_finished_twice():
    programs = left_fold_of_two()
    programs[1].append(Round(finish()))
    error = refused(programs)
    assert str(error) == "rank 1 in round 2, chunk 0: finished twice"
    assert place(error) == (1, 2, 0)


def test_never_finished():
    programs = left_fold_of_two()
    del programs[0][1]
    error = refused(programs)
    assert str(error) == "rank 0 ends with chunk 0 not finished"
    assert place(error) == (0, None, 0)


def test_reduced_after_it_was_finished():
    programs = left_fold_of_two()
    programs[0].append(Round(reduce_from(1)))
    programs[1].append(Round(send(0)))
    error = refused(programs)
    assert str(error) == "rank 0 in round 3, chunk 0: reduces what was finished already"
    assert place(error) == (0, 3, 0)


def test_other_expressions_on_other_ranks():
    # Recursive doubling in which every rank puts its own side first: equal sums, but not equal bits.
    programs = [
        [Round(send(1 - rank), reduce_from(1 - rank, received_first=False)), Round(finish())] for rank in (0, 1)
    ]
    error = refused(programs)
    assert str(error) == "rank 1 ends with another expression in chunk 0 than the ranks below it"
    assert place(error) == (1, None, 0)


def test_another_order_on_another_rank():
    # Everybody sends to everybody, and each adds in its own order.
    n = 3
    programs = [
        [
            Round(
                *(send((rank + d) % n) for d in (1, 2)),
                *(reduce_from((rank + d) % n, received_first=False) for d in (1, 2)),
            ),
            Round(finish()),
        ]
        for rank in range(n)
    ]
    assert "another expression" in str(refused(programs))


def test_sending_a_chunk_that_one_does_not_have():
    programs = [[Round(send(1, chunk=1))], [Round(receive(0, chunk=1))]]
    error = refused(programs, "allgather", chunks=2)
    assert str(error) == "rank 0 in round 0 sends chunk 1, which it does not have"
    assert place(error) == (0, 0, 1)


def test_reducing_into_a_chunk_that_one_does_not_have():
    error = refused([[Round(send(1, chunk=0))], [Round(reduce_from(0, chunk=0))]], "allgather", chunks=2)
    assert str(error) == "rank 1 in round 0, chunk 0: reduces into a chunk that it does not have"
    assert place(error) == (1, 0, 0)


def test_allgather_that_lacks_a_chunk():
    programs = [[Round(send(1, chunk=0))], [Round(receive(0, chunk=0))]]
    error = refused(programs, "allgather", chunks=2)
    assert str(error) == "rank 0 ends without the contribution of rank 1 in chunk 1"


def test_allgather_that_mixes_contributions():
    # Rank 0 gets chunk 1 from its owner, and then adds it up with itself on the way back.
    programs = [
        [Round(send(1, 0), receive(1, 1)), Round(send(1, 1))],
        [Round(send(0, 1), receive(0, 0)), Round(reduce_from(0, 1))],
    ]
    assert "counts rank 1 twice" in str(refused(programs, "allgather", chunks=2))


def test_broadcast_from_the_wrong_root():
    programs = schedules("tree", Collective.BROADCAST, 4, root=0)
    error = refused(programs, "broadcast", root=2)
    assert str(error) == "rank 0 in round 0 sends chunk 0, which it does not have"


def test_broadcast_that_leaves_one_out():
    error = refused([[Round(send(1))], [Round(receive(0))], []], "broadcast")
    assert str(error) == "rank 2 ends without the contribution of rank 0 in chunk 0"
    assert place(error) == (2, None, 0)


def test_reduction_to_the_wrong_root():
    error = refused(schedules("parameter_server", Collective.REDUCE, 3, root=0), "reduce", root=1)
    assert str(error) == "rank 1 ends without the contribution of rank 2 in chunk 0"


def test_a_broadcast_is_no_allreduce():
    error = refused(schedules("tree", Collective.BROADCAST, 2), "allreduce")
    assert str(error) == "rank 0 ends without the contribution of rank 1 in chunk 0"


def test_an_allreduce_is_no_broadcast():
    error = refused(schedules("ring", Collective.ALLREDUCE, 2), "broadcast", chunks=2)
    assert "does not have" in str(error)


@pytest.mark.parametrize(("name", "collective"), [(name, c) for name, entry in TABLE.items() for c in entry.schedules])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_single_step_is_needed_and_every_chunk_matters(name, collective, n):
    chunks, right = TABLE[name].chunks(collective, n), schedules(name, collective, n)
    for rank, program in enumerate(right):
        for index, a_round in enumerate(program):
            for slot, step in enumerate(a_round):
                without = Round(*a_round[:slot], *a_round[slot + 1 :])
                wrong = [without]
                if chunks > 1:
                    moved = type(step)(
                        step.action, step.peer, (step.chunk + 1) % chunks, step.count, step.received_first
                    )
                    wrong.append(Round(*a_round[:slot], moved, *a_round[slot + 1 :]))
                for other in wrong:
                    programs = [*right]
                    programs[rank] = [*program[:index], other, *program[index + 1 :]]
                    refused(programs, collective, chunks)


def test_check_takes_names_and_refuses_others():
    assert check("ring", "allreduce", 3) == check("ring", Collective.ALLREDUCE, 3)
    with pytest.raises(ValueError, match="unknown algorithm 'rung'; known: ring, tree"):
        check("rung", "allreduce", 3)
    with pytest.raises(
        ValueError,
        match="algorithm 'tree' does not serve allgather; these do: ring, circulant, pat, swing, multi_radix, ",
    ):
        check("tree", "allgather", 3)
    with pytest.raises(ValueError, match="alltoall"):
        check("ring", "alltoall", 3)


# -- rounded values


@pytest.mark.parametrize("sizes", [range(1, 17), *thorough((17, 18, 19, 31, 32, 33, 64))])
def test_all_ranks_round_alike_with_every_algorithm(sizes):
    for name, entry in TABLE.items():
        for collective in entry.schedules:
            for n in sizes:
                check(name, collective, n, rounded=True)


def test_a_sender_that_keeps_what_it_has_not_sent_ends_otherwise(monkeypatch):
    carry = _Expressions.carry

    def keeping(state, message):
        before = dict(state.held[message.source])
        carry(state, message)
        state.held[message.source] = before

    monkeypatch.setattr(_Expressions, "carry", keeping)
    check("recursive_doubling", "allreduce", 4)
    with pytest.raises(ScheduleError, match="ends with another expression"):
        check("recursive_doubling", "allreduce", 4, rounded=True)
