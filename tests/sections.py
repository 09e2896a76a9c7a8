"""Which parameters of public names their docstrings leave out."""

import inspect
import re
from importlib import import_module


def documented(docstring):
    """Return the names in a docstring's section of parameters, as NumPy's style has it."""
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\w[\w ]*\n-{3,}\n|\Z)", docstring, re.MULTILINE | re.DOTALL)
    lines = section[1].splitlines() if section else []
    heads = [line.split(" : ")[0] for line in lines if line and not line[0].isspace()]
    return {name.strip().lstrip("*") for head in heads for name in head.split(",")}


def left_out(something):
    """Return the parameters of a function or class that its docstring does not describe."""
    chooses = inspect.isclass(something) and {"__new__", "__init__"} <= set(vars(something))  # one of its subclasses
    called = something.__init__ if chooses else something
    names = [name for name in inspect.signature(called).parameters if name != "self"]
    return [name for name in names if name not in documented(inspect.getdoc(something) or "")]


def silent(modules):
    """Yield the public names of modules that leave parameters out, with these; errors take a message."""
    for module in map(import_module, modules):
        for name in module.__all__:
            something = getattr(module, name)
            error = inspect.isclass(something) and issubclass(something, BaseException)
            if callable(something) and not error and (missing := left_out(something)):
                yield name, missing
