"""The structure of the package: what is exported, who may import whom, and what every function says of itself."""

import ast
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import sections

import mpiagg

TOP = Path(__file__).parents[1]
PACKAGE = TOP / "mpiagg"
MODULES = sorted(PACKAGE.rglob("*.py"))

EXPORTED = {
    "Comm",
    "allreduce",
    "allreduce_init",
    "reduce",
    "reduce_init",
    "broadcast",
    "broadcast_init",
    "allgather",
    "allgather_init",
    "reduce_scatter",
    "reduce_scatter_init",
    "gather",
    "gather_init",
    "scatter",
    "scatter_init",
    "alltoall",
    "alltoall_init",
    "alltoallv",
    "alltoallv_init",
    "allgatherv",
    "allgatherv_init",
    "scan",
    "scan_init",
    "exscan",
    "exscan_init",
    "neighbor_allgather",
    "neighbor_allgather_init",
    "neighbor_allgatherv",
    "neighbor_allgatherv_init",
    "neighbor_alltoall",
    "neighbor_alltoall_init",
    "neighbor_alltoallv",
    "neighbor_alltoallv_init",
    "empty",
    "bind_device",
    "Plan",
    "algorithms",
    "simulate",
    "Aggregation",
    "AllReduce",
    "ParameterServer",
    "Sparsified",
    "PowerSGD",
    "ErrorFeedback",
    "Decentralized",
    "NeighborAverage",
    "LowPrecisionDecentralized",
    "LocalSGD",
    "SparseLoCo",
    "DeMo",
    "DDP",
    "Sharded",
    "optimizers",
    "Loop",
    "save_checkpoint",
    "load_checkpoint",
    "DeviceError",
    "Error",
    "MismatchError",
    "NonFiniteError",
    "PlanError",
    "RankFailedError",
    "ScheduleError",
    "StallError",
}

LAYERS = [
    "errors",
    "common",
    "schedules",
    "arrays",
    "optimizers",
    "cuda",
    "watch",
    "launch",
    "tables",
    "transport",
    "plans",
    "collectives",
    "checkpoints",
    "aggregation",
    "ddp",
    "sharded",
    "torch",
    "horovod",
    "jax",
    "benchmarks",
    "cli",
    "__main__",
    "__init__",
]
"""The subpackages, the lowest first; a gradient passes them from ddp down."""


def subpackage(module):
    """Return the subpackage of a module's name: ``mpiagg.schedules.ring`` is in ``schedules``."""
    return module.split(".")[1] if "." in module else "__init__"


def name_of(path):
    return ".".join(path.relative_to(TOP).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def imports_of(path):
    """Return the modules of this package that a module imports when it is itself imported, or only later."""
    modules = {name_of(other) for other in MODULES}
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            whole = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= whole or {node.module} & modules
    return found


def test_exported_names_are_the_documented_ones():
    assert set(mpiagg.__all__) == EXPORTED
    assert len(mpiagg.__all__) == len(EXPORTED)
    assert set(dir(mpiagg)) >= EXPORTED


def run_python(script):
    """Run a script in a process of its own: in this one MPI must not start, for it starts jobs."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=TOP, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_exported_name_is_there_and_says_what_it_is():
    script = "import mpiagg; print([name for name in mpiagg.__all__ if not getattr(mpiagg, name).__doc__])"
    assert run_python(script) == "[]"


DESCRIBED = {
    "mpiagg": None,
    "mpiagg.optimizers": None,
    "mpiagg.checkpoints": None,
    "mpiagg.torch": "torch",
    "mpiagg.horovod.torch": "torch",
    "mpiagg.horovod.torch.elastic": "torch",
    "mpiagg.jax": "jax",
}
"""The modules whose public names say what they take, return and raise, and the package that each of them needs."""


@pytest.mark.parametrize("module", DESCRIBED)
def test_docstrings_of_public_names_leave_nothing_out(module):
    needed = DESCRIBED[module]
    if needed and find_spec(needed) is None:
        pytest.skip(f"{needed}, an extra, is not installed")
    script = f"import sys; sys.path.append('tests'); import sections; print(*sections.silent(['{module}']), sep='\\n')"
    assert run_python(script) == ""


def test_a_parameter_that_is_left_out_is_found():
    def function(x, y, z):
        """Do something.

        Parameters
        ----------
        x, z : int
            Two of three.

        Returns
        -------
        y
        """

    assert sections.left_out(function) == ["y"]


def test_a_result_that_is_left_out_is_found():
    def function() -> int:
        """Return something."""

    def nothing() -> None:
        """Do something."""

    def generator() -> int:
        """Yield something.

        Yields
        ------
        int
        """

    assert sections.missing(function) == ["Returns"]
    assert sections.missing(nothing) == sections.missing(generator) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Raises\n------\nValueError, mpiagg.Error\n    If so.\nTypeError\n    If not:\n\n    never.\n", []),
        ("Raises\n------\nValueError\n    If so.\n\nNotes\n-----\nNone.\n", []),
        ("Raises\n-----\nValueError\n    If so.\n", ["the line below Raises"]),
        ("Raises\n------\nValueError if so.\n", ["Raises: ValueError if so."]),
        ("Raises\n------\nValueError\nTypeError\n    If so.\n", ["Raises: ValueError"]),
        ("Raises\n------\n\nNotes\n-----\nNone.\n", ["Raises: nothing"]),
    ],
)
def test_a_section_of_another_form_is_found(text, wrong):
    assert sections.ill_formed(f"Do something.\n\n{text}") == wrong


class Above:
    """A class of a package."""

    def said(self, x):
        """Do something.

        Parameters
        ----------
        x : int
            A number.
        """

    def unsaid(self, x):
        """Do something."""


class Below(Above, dict):
    """A class that overrides one of its methods, and one of another package's."""

    def said(self, x):
        """Do it in another way."""

    def pop(self, key) -> int:
        """Take something away."""

    def _unsaid(self, x):
        """Do something inside."""


def test_methods_of_classes_are_asked_too():
    own = sections.methods(Below, __name__.split(".", maxsplit=1)[0])
    found = {method.__qualname__: sections.missing(method, told) for method, told in own}
    assert found == {"Above.unsaid": ["x"], "Below.said": [], "Below.pop": ["key", "Returns"]}


@pytest.mark.parametrize("name", sorted(EXPORTED))
def test_every_exported_name_is_written_about(name):
    pages = [TOP / "README.md", *sorted((TOP / "docs").glob("*.md"))]
    assert any(re.search(rf"\b{name}\b", page.read_text()) for page in pages)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'mpiagg' has no attribute 'nonsense'"):
        _ = mpiagg.nonsense


@pytest.mark.parametrize("module", ["mpiagg", "mpiagg.schedules", "mpiagg.collectives.simulation", "mpiagg.cli"])
def test_importing_does_not_start_mpi_or_load_a_gpu_library(module):
    script = f"import sys, {module}; print([m for m in ('mpi4py.MPI', 'cupy', 'torch', 'sklearn') if m in sys.modules])"
    assert run_python(script) == "[]"


def test_the_root_holds_the_entrance_the_errors_and_subpackages():
    loose = {path.stem for path in PACKAGE.glob("*.py")}
    assert loose == {"__init__", "__main__", "errors"}


def test_every_subpackage_has_a_layer():
    assert {subpackage(name_of(path)) for path in MODULES} == set(LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_import_is_from_a_higher_layer(path):
    own = LAYERS.index(subpackage(name_of(path)))
    above = {other for other in imports_of(path) if LAYERS.index(subpackage(other)) > own}
    # The top of the package stands above all; only what measures and the command line look up there.
    assert above <= ({"mpiagg"} if own >= LAYERS.index("benchmarks") else set())


def public(body):
    """Yield the public classes and functions of a module or class, and those inside its public classes."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_everything_public_says_what_it_is(path):
    assert ast.get_docstring(tree_of(path))
    silent = [node.name for node in public(tree_of(path).body) if not ast.get_docstring(node)]
    assert not silent


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_and_functions_stay_small(path):
    assert len(path.read_text().splitlines()) < 400
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]
    long = [node.name for node in functions if code_lines(node) >= 60]
    assert not long


def code_lines(function):
    """Return how long a function is without its docstring."""
    first = function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]
    return function.body[-1].end_lineno - first.lineno + 1


SAME_NAMES = {
    "ErrorFeedback": "in power_sgd.py a name for the type checker alone: there it stands for the class, imported late",
}
"""Names of classes that other modules may use, and why."""


def classes_of(tree):
    """Return the names of the classes and of the aliases of types that a module defines."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    aliases = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name) and re.match(r"_?[A-Z].*[a-z]", target.id)
    }
    return names, aliases


def same_names(trees):
    """Return the names of classes that another module gives to a class or an alias, with the modules."""
    classes, users = set(), {}
    for module, tree in trees.items():
        names, aliases = classes_of(tree)
        classes |= names
        for name in names | aliases:
            users.setdefault(name, []).append(module)
    return {name: users[name] for name in sorted(classes) if len(users[name]) > 1}


def test_a_class_name_has_one_meaning_in_the_package():
    found = same_names({name_of(path): tree_of(path) for path in MODULES})
    assert {name: modules for name, modules in found.items() if name not in SAME_NAMES} == {}
    assert set(SAME_NAMES) <= set(found), "an exception that is not needed any more"


def test_a_class_name_with_two_meanings_is_found():
    texts = {
        "a": "class Layout: pass\nclass Own:\n    class Inner: pass",
        "b": "Layout = tuple[int, ...]",
        "c": "class Inner: pass\nLIMIT = 3\nOther = list[int]",
        "d": "Other = set[int]",
    }
    found = same_names({module: ast.parse(text) for module, text in texts.items()})
    assert found == {"Inner": ["a", "c"], "Layout": ["a", "b"]}


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
    assert 'mpiagg = ["py.typed"' in (TOP / "pyproject.toml").read_text()
