"""Jobs with a fault in them: they end at once, by the right words, and nothing is left of them; the others take longer,
and are in bench/faults.py."""

from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("shape: short", 3),
        ("collective: nonblocking", 3),
        ("op: short", 3),
        ("late: Comm", 3),
        ("late: the freeing of a Comm", 2),
        ("exception: before a call", 2),
        ("sys.exit(3): before a call", 2),
        ("SIGTERM: in MPI_Allreduce", 3),
        ("SIGKILL: waiting", 2),
        ("SIGKILL of the launcher: in short calls", 2),
        ("given up: check=True", 3),
    ],
)
def test_a_job_with_a_fault_ends_as_it_should(monkeypatch, name, ranks):
    monkeypatch.syspath_prepend(TOP)
    from bench import fault_jobs, faults

    case = next(case for case in faults.fault_cases.cases() if case.name == name)
    # How long it takes is the machine's affair; a deadline much later shows that it was not that which has ended it.
    limits = fault_jobs.Limits(warn=1, timeout=60, slack=50)
    outcome = fault_jobs.run(case, ranks, limits)
    if wrong := fault_jobs.complaints(case, ranks, outcome, limits):
        said = [f"-- rank {each.rank}: {each.kind} {each.text}\n{each.printed[-2000:]}" for each in outcome.said]
        pytest.fail("\n".join([*wrong, outcome.launcher[-2000:], *said]), pytrace=False)
