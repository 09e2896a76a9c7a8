"""Pictures of schedules, as text."""

import pytest

from mpiagg.schedules import TABLE, picture

PICTURES = {
    ("ring", "allreduce", 3): """
round  rank 0   rank 1   rank 2
-----  -------  -------  -------
0      0>1 2+2  1>2 0+0  2>0 1+1
1      2>1 1+2  0>2 2+0  1>0 0+1
2      1!       2!       0!
3      1>1 0<2  2>2 1<0  0>0 2<1
4      0>1 2<2  1>2 0<0  2>0 1<1
""",
    ("circulant", "reduce_scatter", 3): """
round  rank 0   rank 1   rank 2
-----  -------  -------  -------
0      2>2 0+1  0>0 1+2  1>1 2+0
1      1>1 0+2  2>2 1+0  0>0 2+1
2      0!       1!       2!
""",
    ("tree", "allreduce", 4): """
round  rank 0   rank 1  rank 2  rank 3
-----  -------  ------  ------  ------
0      0+1      0+3     0>0     0>1
1      0+2      0>0     0<0     0<1
2      0!       0<0
3      0>1 0>2  0>3
""",
    ("parameter_server", "reduce", 3, 1): """
round  rank 0  rank 1  rank 2
-----  ------  ------  ------
0      0>1     0+2     0>1
1              0+0
2              0!
""",
    ("recursive_doubling", "allreduce", 3): """
round  rank 0   rank 1  rank 2
-----  -------  ------  -------
0      0+1      0>0     0>0 0+0
1      0>2 0+2  0<0     0!
2      0!
3      0>1
""",
    ("halving_doubling", "allreduce", 4): """
round  rank 0       rank 1       rank 2       rank 3
-----  -----------  -----------  -----------  -----------
0      2-3>1 0-1+1  0-1>0 2-3+0  2-3>3 0-1+3  0-1>2 2-3+2
1      1>2 0+2      3>3 2+3      0>0 1+0      2>1 3+1
2      0!           2!           1!           3!
3      0>2 1<2      2>3 3<3      1>0 0<0      3>1 2<1
4      0-1>1 2-3<1  2-3>0 0-1<0  0-1>3 2-3<3  2-3>2 0-1<2
""",
}


@pytest.mark.parametrize("arguments", PICTURES)
def test_picture(arguments):
    assert picture(*arguments) == PICTURES[arguments].strip()


@pytest.mark.parametrize(("name", "collective"), [(name, c) for name, entry in TABLE.items() for c in entry.schedules])
def test_every_schedule_draws_one_column_a_rank(name, collective):
    for n in (1, 2, 5, 11):
        head, line, *rows = picture(name, collective, n).splitlines()
        assert head.split("  ")[0] == "round"
        assert [word for word in head.split() if word.isdecimal()] == [str(rank) for rank in range(n)]
        assert set(line) <= {"-", " "}
        assert [row.split()[0] for row in rows] == [str(index) for index in range(len(rows))]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="known: ring"):
        picture("rung", "allreduce", 3)
