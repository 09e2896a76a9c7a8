"""``mpiagg info``: how it tells what it finds, alone, under launchers, and under those of another library."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpiagg.cli import main
from mpiagg.cli.diagnostics import JobReport
from mpiagg.cli.facts import Problem, Rank
from mpiagg.cli.info import MOST_HOSTS, _tell
from mpiagg.cli.probe import Probed
from mpiagg.launch import start as launch

A, B = "00000000-a", "00000000-b"
RAIN = Problem("warning", "weather", "it rained", "wait")


def rank(number=0, device=None, visible=(), **more):
    words = {"host": "node", "mpi": "Some MPI 1.0", "reason": "a reason", "processors": 8}
    words |= {"cpus": [0, 1, 2, 4], "shm": [3 * 2**30, 2**32], "transport": "carrots", "cupy": "14"}
    return Rank(number, visible=list(visible), device=device, **words | more)


@pytest.fixture
def told(capsys, monkeypatch):
    """Return a function that returns what is told of ranks, with single spaces."""
    monkeypatch.setenv("COLUMNS", "200")

    def told(*ranks, **more):
        _tell(JobReport("5.0", list(ranks), **more), json_file=None)
        return " ".join(capsys.readouterr().out.split())

    return told


def test_all_is_told(told):
    ranks = [
        rank(number, number % 2, [A, B], reason="pip install cupy-cuda12x", troubles=[RAIN]) for number in range(3)
    ]
    out = told(*ranks, probe=Probed(able=False, reason="signal 11"))
    for words in (
        "Some MPI 1.0 (MPI 5.0)",
        "thread level │ multiple",
        "3 on 1 node (node: 3)",
        "processors │ 0-2, 4 of 8",
        "shared memory of node │ /dev/shm: 3.0 GiB of 4.0 GiB free, 1.0 GiB for each rank",
        "transports │ carrots",
        "no: pip install cupy-cuda12x",
        "probe of cuda memory │ no: signal 11",
        "GPUs │ 2 for more ranks: shared",
        f"│ 2 │ node │ 0 │ 2 │ {A} │ 0 │",
        f"│ 1 │ node │ 1 │ 2 │ {B} │ - │",
        "Warning: ranks 0-2: it rained. Remedy: wait.",
    ):
        assert words in out


def test_what_differs_is_told_of_each(told):
    out = told(rank(0), rank(1, linear=2, environment={"OMP_NUM_THREADS": "2", "UCX_TLS": "tcp"}), rank(2))
    assert "ranks 0, 2: 1 thread; rank 1: 2 threads (OMP_NUM_THREADS=2)" in out
    assert "ranks 0, 2: carrots; rank 1: carrots (UCX_TLS=tcp)" in out
    assert out.count("Some MPI 1.0") == 1


def test_settings_stand_where_they_belong(told):
    settings = {"MPIAGG_TIMEOUT": "5", "UCX_TLS": "tcp", "OMPI_MCA_pml": "ob1"}
    out = told(rank(vendor="MPICH", environment=settings))
    assert "transports │ carrots (UCX_TLS=tcp) │" in out
    assert "settings │ MPIAGG_TIMEOUT=5 │" in out
    assert "(OMPI_MCA_pml=ob1, UCX_TLS=tcp)" in told(
        rank(vendor="Open MPI", environment=dict(sorted(settings.items())))
    )


def test_nodes_that_are_many_are_not_all_named(told):
    out = told(*(rank(number, machine=number) for number in range(20)))
    assert "20 on 20 nodes" in out
    assert out.count("node: 1") == MOST_HOSTS


def test_health_is_told(told):
    assert told(rank()).endswith("No problem was found.")


def test_json_has_the_same(capsys):
    ranks = [rank(0, 0, [A, B]), rank(1, 0, [A, B], troubles=[RAIN])]
    _tell(JobReport("5.0", ranks, Probed(able=False, reason="signal 11")), json_file=Path("-"))
    saved = json.loads(capsys.readouterr().out)
    assert list(saved) == [
        *("mpiagg", "mpi4py", "mpi", "standard", "threads", "launcher", "nodes", "ranks"),
        *("cuda_aware", "probe", "shared", "problems"),
    ]
    assert saved["mpi"] == "Some MPI 1.0"
    assert saved["cuda_aware"] == {"able": False, "reason": "a reason"}
    assert saved["probe"] == {"able": False, "reason": "signal 11", "memory": "cuda"}
    assert saved["shared"] == [{"ranks": [0, 1], "accident": True}]
    assert saved["nodes"] == [[0, 1]]
    assert [one["visible"] for one in saved["ranks"]] == [[A, B]] * 2
    assert saved["ranks"][1]["troubles"] == [RAIN._asdict()]
    assert [problem["what"][:9] for problem in saved["problems"]] == ["rank 1: i", "ranks 0-1"]
    assert set(saved["problems"][0]) == {"level", "name", "what", "remedy"}


# -- the command


def test_a_process_alone_is_told_of(mpiagg):
    done = mpiagg("info", "--probe", "--memory", "host", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["mpi"].startswith(launch.mpi_vendor())
    assert len(found["ranks"]) == 1
    assert found["nodes"] == [[0]]
    assert found["probe"] == {
        "able": True,
        "reason": "messages of 8 B, 64 KiB, 8 MiB came through",
        "memory": "host",
    }


def test_without_a_gpu_the_probe_says_so(mpiagg):
    done = mpiagg("info", "--probe", "--json", CUDA_VISIBLE_DEVICES="")
    assert done.status == 0, done.err
    probe = json.loads(done.out)["probe"]
    assert probe["able"] is None
    assert "no CUDA device" in probe["reason"] or "CUDA devices need CuPy" in probe["reason"]


def test_the_numbers_are_saved_beside_the_tables(mpiagg, tmp_path):
    done = mpiagg("info", "--json", str(tmp_path / "info.json"))
    assert done.status == 0, done.err
    assert json.loads((tmp_path / "info.json").read_text())["nodes"] == [[0]]
    assert "mpi4py" in done.out
    with pytest.raises(json.JSONDecodeError):
        json.loads(done.out)


def test_a_file_that_cannot_be_written_is_told_at_once():
    done = CliRunner().invoke(main, ["info", "--json", "/absent/info.json"])
    assert (done.exit_code, "folder '/absent' does not exist" in done.output) == (2, True)


def test_a_job_is_told_of_by_one_rank(run):
    done = run(launch.command(3, ["-m", "mpiagg", "info", "--json"]), MPIAGG_NODES="2,1", MPIAGG_CUDA_AWARE="yes")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["nodes"] == [[0, 1], [2]]
    assert [one["rank"] for one in found["ranks"]] == [0, 1, 2]
    assert found["cuda_aware"] == {"able": True, "reason": "MPIAGG_CUDA_AWARE=yes says so"}


def test_what_is_wrong_with_settings_is_an_error(mpiagg, tmp_path):
    (tmp_path / "table.json").write_text("{")
    done = mpiagg("info", MPIAGG_CUDA_AWARE="perhaps", MPIAGG_TUNING="table.json", MPIAGG_NODES="7")
    assert done.status == 1
    assert "Error: rank 0: MPIAGG_CUDA_AWARE='perhaps' must be" in done.out
    assert "Error: rank 0: tuning table 'table.json'" in done.out
    assert "Error: MPIAGG_NODES=7 does not say" in done.out


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_ranks_that_do_not_see_each_other_are_told(mpiagg, variable):
    done = mpiagg("info", **{variable: "4"})
    assert done.status == 1
    assert "started 4 processes, but" in done.out
    assert "Remedy: start it with" in done.out


def test_the_first_of_them_tells_it_for_all(mpiagg):
    done = mpiagg("info", "--json", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="0")
    assert [problem["name"] for problem in json.loads(done.out)["problems"]] == ["copies"]
    assert mpiagg("info", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="1") == (0, "", "")


def test_the_thread_level_is_the_users(mpiagg):
    done = mpiagg("info", MPI4PY_RC_THREAD_LEVEL="serialized")
    assert done.status == 0
    assert "Warning: rank 0: MPI is initialised for thread level serialized" in done.out


def test_those_who_are_to_work_alone_are_well(mpiagg):
    done = mpiagg("info", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="1", MPIAGG_ALONE="1")
    assert done.status == 0
    assert "srun, of 4 ranks" in done.out


@pytest.mark.skipif("launch.mpi_vendor() != 'MPICH'")
def test_a_library_that_would_end_the_process_is_not_started(mpiagg):
    done = mpiagg("info", PMIX_NAMESPACE="job", OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="0")
    assert done.status == 1
    assert "Error: this process, which the mpiexec of Open MPI started as one of 4, is to find" in done.out
    assert "MPI cannot start" in done.out


def test_a_rank_starts_no_probe(mpiagg):
    done = mpiagg("info", "--probe", PMI_SIZE="4")
    assert done.status == 2
    assert "--probe starts a job of its own" in done.err
