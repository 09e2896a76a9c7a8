"""Whether messages reach device memory: who is asked, in which order, and what is made of the answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mpiagg.transport import awareness as asked

pytestmark = pytest.mark.mpi

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution"
MPICH = "MPICH Version:      {}\nMPICH Device:       ch4:ucx"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.29.3 (ANL base 3.4a2)"
MVAPICH = "MVAPICH2 Version      :\t2.3.7"
PARASTATION = "=== ParaStation MPI 5.11.0 ===\nMPICH Version: 4.3.0"
INTEL = "Intel(R) MPI Library 2021.13 for Linux* OS"
OTHER = "Some MPI 1.0"

OLD = "MPIX_Query_cuda_support"
NEW = "MPIX_GPU_query_support"


def judge(library, kinds=None, told=None, **environment):
    return asked.judge(environment, library, kinds, lambda: told)


@pytest.fixture
def variables(monkeypatch):
    """Return a function that sets the environment for what is asked next."""

    def variables(**values):
        for name in (asked.USER, "UCX_TLS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        asked.awareness.cache_clear()

    yield variables
    monkeypatch.undo()
    asked.awareness.cache_clear()


# -- the user's word


@pytest.mark.parametrize(
    ("word", "able"),
    [("1", True), ("yes", True), ("TRUE", True), (" 1 ", True), ("0", False), ("No", False), ("false", False)],
)
def test_the_users_word_is_enough(variables, monkeypatch, word, able):
    # Neither what would contradict it is looked at, nor is the library asked.
    monkeypatch.setattr(asked, "judge", None)
    variables(MPIAGG_CUDA_AWARE=word, UCX_TLS="tcp")
    assert asked.awareness() == (able, f"MPIAGG_CUDA_AWARE={word} says so")


@pytest.mark.parametrize("word", ["", "2", "perhaps", "on"])
def test_another_word_is_told_every_time(variables, word):
    variables(MPIAGG_CUDA_AWARE=word)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"MPIAGG_CUDA_AWARE='{word}' must be 1, yes or true, or 0, no or false"):
            asked.awareness()


# -- this library


def test_the_library_of_this_job_answers(variables):
    variables()
    able, reason = asked.awareness()
    assert isinstance(able, bool)
    assert reason
    assert asked.awareness() is asked.awareness()


def test_the_librarys_own_function_is_found():
    if MPI.get_vendor()[0] not in ("MPICH", "Open MPI"):
        return
    name, able = asked._extension()
    assert name == (NEW if MPI.get_vendor()[0] == "MPICH" else OLD)
    assert isinstance(able, bool)


def test_a_library_without_the_function_has_no_answer(monkeypatch):
    class Nothing:
        def __init__(self, path):
            assert path == MPI.__file__

    monkeypatch.setattr(asked.ctypes, "CDLL", Nothing)
    assert asked._extension() is None

    def broken(path):
        raise OSError(path)

    monkeypatch.setattr(asked.ctypes, "CDLL", broken)
    assert asked._extension() is None


def test_the_function_that_can_end_the_process_is_asked_last(monkeypatch):
    class Library:
        def __init__(self, path):
            pass

        @staticmethod
        def MPIX_GPU_query_support(kind, answer):
            assert kind == 0
            answer._obj.value = 1
            return 0

        @staticmethod
        def MPIX_Query_cuda_support():
            raise AssertionError

    monkeypatch.setattr(asked.ctypes, "CDLL", Library)
    assert asked._extension() == (NEW, True)
    monkeypatch.delattr(Library, "MPIX_GPU_query_support")
    monkeypatch.setattr(Library, "MPIX_Query_cuda_support", staticmethod(lambda: 1))
    assert asked._extension() == (OLD, True)


# -- any library


@pytest.mark.parametrize(
    ("library", "kinds", "able"),
    [
        (OPEN_MPI, "mpi,system,cuda", True),
        (OPEN_MPI, "system,mpi,cuda:device:managed", True),
        (MPICH.format("4.3.0"), "mpi,system,cuda", True),
        (MPICH.format("5.0.2"), "mpi,system", False),
        (MPICH.format("10.0"), "mpi,system,rocm", False),
        # Here what is not listed says nothing.
        (OPEN_MPI, "system,mpi,cuda:host", None),
        (OPEN_MPI, "system,mpi,rocm", None),
        (OPEN_MPI, None, None),
        (MPICH.format("4.2.3"), "mpi,system", None),
        (MPICH.format("4.1"), None, None),
        (PARASTATION, "mpi,system", None),
    ],
)
def test_kinds_of_memory(library, kinds, able):
    for said in (True, False):
        found = judge(library, kinds, (OLD, said), PSP_CUDA="1")
        assert found.able == (said if able is None else able)
        assert ("kinds" in found.reason) == (able is not None)
        assert found.reason.startswith(OLD) == (able is None)


def test_without_any_answer_messages_are_staged():
    for library in (OPEN_MPI, MPICH.format("4.2.0"), CRAY, MVAPICH, PARASTATION, INTEL, OTHER):
        assert judge(library) == (False, "nothing says that the MPI library can, and MPIAGG_CUDA_AWARE is not set")


@pytest.mark.parametrize(
    ("library", "switches"),
    [
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "1"}),
        (MVAPICH, {"MV2_USE_CUDA": "1"}),
        (PARASTATION, {"PSP_CUDA": "1"}),
        (INTEL, {"I_MPI_OFFLOAD": "2", "I_MPI_OFFLOAD_MODE": "cuda"}),
    ],
)
def test_switches(library, switches):
    assert judge(library, **switches).able
    assert judge(library, told=(OLD, True), **switches) == (True, f"{OLD} says yes")
    assert judge(library, told=(OLD, False), **switches) == (False, f"{OLD} says no")
    # Where one of them is missing or off, an answer of the library does not help; another library does not look at it.
    for variable in switches:
        off = {**switches, variable: "0"}
        unset = {name: value for name, value in switches.items() if name != variable}
        assert not judge(library, **off).able
        assert not judge(library, **unset).able
        found = judge(library, told=(OLD, True), **off)
        assert found == (False, f"{variable}=0, which keeps the MPI library from it")
        found = judge(library, told=(OLD, True), **unset)
        assert found == (False, f"{variable} is not set, which keeps the MPI library from it")
        assert judge(OTHER, told=(OLD, True), **off).able
    assert not judge(OTHER, **switches).able


@pytest.mark.parametrize(
    ("library", "variable"), [(OPEN_MPI, "OMPI_MCA_opal_cuda_support"), (MPICH.format("4.1"), "MPIR_CVAR_ENABLE_GPU")]
)
def test_switches_that_are_on_by_themselves(library, variable):
    assert judge(library, told=(NEW, True)).able
    assert judge(library, told=(NEW, True), **{variable: "true"}).able
    assert judge(library, told=(NEW, True), **{variable: "0"}) == (
        False,
        f"{variable}=0, which keeps the MPI library from it",
    )
    assert judge(library, **{variable: "1"}) == (True, f"{variable}=1 says so")


@pytest.mark.parametrize(
    ("tls", "able"),
    [
        ("", True),
        ("all", True),
        ("rc,sm,cuda_copy,cuda_ipc", True),
        ("rc, cuda", True),
        ("\\cuda_copy,tcp", True),
        ("^tcp,ib", True),
        ("rc,sm", False),
        ("tcp,self", False),
        ("rc,gdr_copy", False),
        ("^cuda", False),
        ("^tcp,cuda_copy", False),
    ],
)
def test_transports_of_ucx_without_cuda_turn_a_yes_into_a_no(tls, able):
    found = judge(OPEN_MPI, told=(OLD, True), UCX_TLS=tls)
    assert found.able == able
    assert able or found.reason == f"UCX_TLS={tls} leaves out cuda_copy, without which UCX cannot"
    assert judge(OPEN_MPI, told=(OLD, False), UCX_TLS=tls).reason == f"{OLD} says no"


@given(
    library=st.sampled_from([OPEN_MPI, MPICH.format("4.3"), CRAY, MVAPICH, PARASTATION, INTEL]) | st.text(),
    kinds=st.none() | st.text(alphabet="acdeuv,:h ", max_size=20),
    told=st.none() | st.tuples(st.just(OLD), st.booleans()),
    environment=st.dictionaries(
        st.sampled_from([switch.variable for switch in asked._SWITCHES] + ["UCX_TLS"]), st.text(max_size=5)
    ),
)
def test_a_yes_has_a_ground_and_every_answer_a_reason(library, kinds, told, environment):
    able, reason = asked.judge(environment, library, kinds, lambda: told)
    assert reason
    if able:
        assert told == (OLD, True) or "cuda" in (kinds or "") or any(value in reason for value in environment.values())
