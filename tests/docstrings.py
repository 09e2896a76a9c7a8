"""The examples in the docstrings of public names: which there are, and what comes of running them."""

import doctest
import inspect
import re
from importlib import import_module

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
NEEDS_A_GPU = ("mpiagg.bind_device",)
"""Names whose examples may be skipped, since they need a device."""


def public(modules):
    """Yield the public classes and functions of modules, with their names."""
    for module in modules:
        for name in import_module(module).__all__:
            something = getattr(import_module(module), name)
            if inspect.isclass(something) or inspect.isroutine(something):
                yield f"{module}.{name}", something


def find(name):
    """Return the public class or function of a full name."""
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def members(name, something):
    """Yield a public name and, of a class, its public methods and properties that are defined in mpiagg."""
    yield name, something
    if inspect.isclass(something):
        for owner in something.__mro__:
            if owner.__module__.partition(".")[0] == "mpiagg":
                for member, value in vars(owner).items():
                    if not member.startswith("_") and (callable(value) or hasattr(value, "__get__")):
                        yield f"{name}.{member}", value


def docstring_of(something):
    """Return the docstring that something has itself, not one that it inherits, without indentation."""
    own = vars(something).get("__doc__") if inspect.isclass(something) else getattr(something, "__doc__", None)
    return inspect.cleandoc(own) if isinstance(own, str) else ""


def has_example(docstring):
    """Return whether a docstring has a section of examples with an example in it."""
    return re.search(r"^Examples\n-{8}\n(?:.*\n)*? *>>> \S", docstring, re.MULTILINE) is not None


def preset():
    """Return the names that examples find."""
    import numpy as np
    from mpi4py import MPI

    import mpiagg

    comm = MPI.COMM_WORLD
    return {"np": np, "mpiagg": mpiagg, "MPI": MPI, "comm": comm, "rank": comm.Get_rank(), "size": comm.Get_size()}


def wrong(name, names):
    """Run the examples of a public name and of its members; return what is wrong, also that it has none."""
    something = find(name)
    said = "" if has_example(docstring_of(something)) else f"{name} has no example\n"
    return said + "".join(failed(member, docstring_of(each), names) for member, each in members(name, something))


def failed(name, docstring, names):
    """Run the examples of a docstring, and return what is wrong with them as text; nothing if all is well."""
    test = doctest.DocTestParser().get_doctest(docstring, dict(names), name, None, 0)
    skipped = [example for example in test.examples if example.options.get(doctest.SKIP)]
    said = [] if name in NEEDS_A_GPU else [f"{name} skips: {example.source}" for example in skipped]
    doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(test, out=said.append)
    return "".join(said)
