"""What docstrings of public names leave out: parameters, what is returned, and the form of each section."""

import inspect
import re
from importlib import import_module

SECTION = re.compile(
    r"^(?P<title>[A-Z]\w*(?: \w+)?)\n(?P<line>-{3,})\n(?P<text>.*?)(?=^[A-Z]\w*(?: \w+)?\n-{3,}\n|\Z)",
    re.MULTILINE | re.DOTALL,
)
ERRORS = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:, (?:\w+\.)*[A-Z]\w*)*\n(?: {4,}\S.*\n*)+")
"""An entry of a section of errors: their names, and below them, indented, when they are raised."""
CALLED_BY_TORCH = "torch.distributed.distributed_c10d.ProcessGroup"
"""torch calls the methods of its process groups, with arguments of its own that differ from version to version: the
docstring of such a class says what its methods take, theirs in one sentence what they do."""


def sections(docstring):
    """Return the text of each section of a docstring, as NumPy's style has it."""
    return {match["title"]: match["text"] for match in SECTION.finditer(docstring)}


def told_of(something):
    """Return the docstrings that describe a function, class or method: usually its own."""
    return [inspect.getdoc(something) or ""]


def documented(docstrings):
    """Return the names in the sections of parameters of docstrings."""
    lines = [line for each in docstrings for line in sections(each).get("Parameters", "").splitlines()]
    heads = [line.split(" : ")[0] for line in lines if line and not line[0].isspace()]
    return {name.strip().lstrip("*") for head in heads for name in head.split(",")}


def left_out(something, docstrings=None):
    """Return the parameters of a function or class that docstrings, its own by default, do not describe."""
    chooses = inspect.isclass(something) and {"__new__", "__init__"} <= set(vars(something))  # one of its subclasses
    called = something.__init__ if chooses else something
    names = [name for name in inspect.signature(called).parameters if name != "self"]
    found = documented(docstrings or told_of(something))
    return [name for name in names if name not in found]


def result_left_out(function, docstrings=None):
    """Whether a function is annotated to return something, and docstrings, its own by default, do not say what."""
    result = inspect.signature(function).return_annotation
    nothing = result in (None, inspect.Signature.empty) or str(result) in (
        "None",
        "NoReturn",
        "Never",
        "Iterator[None]",
    )
    told = [title for each in docstrings or told_of(function) for title in sections(each)]
    return not nothing and not {"Returns", "Yields"} & set(told)


def ill_formed(docstring):
    """Return the sections of a docstring that are not as NumPy's style has them."""
    found = [match for match in SECTION.finditer(docstring) if len(match["title"]) != len(match["line"])]
    wrong = [f"the line below {match['title']}" for match in found]
    for title, text in sections(docstring).items():
        if title in ("Raises", "Warns"):
            entries = [
                entry for entry in re.split(r"^(?=\S)", text.strip() + "\n", flags=re.MULTILINE) if entry.strip()
            ]
            wrong += [f"{title}: {entry.splitlines()[0]}" for entry in entries if not ERRORS.fullmatch(entry)]
        if not text.strip():
            wrong.append(f"{title}: nothing")
    return wrong


def missing(something, docstrings=None):
    """Return all that the docstrings of a function or class leave out, or have in another form."""
    wrong = ill_formed(inspect.getdoc(something) or "")
    if inspect.isclass(something) and issubclass(something, BaseException):  # these take a message
        return wrong
    untold = not inspect.isclass(something) and result_left_out(something, docstrings)
    return left_out(something, docstrings) + ["Returns"] * untold + wrong


def methods(something, package="mpiagg"):
    """Yield the public methods that a class has from a package, each with what the docstrings there say of it.

    A method is described by its own docstring and by those that it overrides in base classes of the package. One that
    overrides mpi4py's has mpi4py's arguments and results, and is left out.
    """
    bases = inspect.getmro(something)
    if any(f"{base.__module__}.{base.__qualname__}" == CALLED_BY_TORCH for base in bases):
        return
    for name in dir(something):
        having = [base for base in bases if name in vars(base)]
        ours = [base for base in having if base.__module__.split(".")[0] == package]
        mpi4py = any(base.__module__.startswith("mpi4py.") for base in having)
        if name.startswith("_") or not ours or having[0] is not ours[0] or mpi4py:
            continue
        if inspect.isroutine(method := getattr(ours[0], name)):
            yield method, [inspect.getdoc(getattr(base, name)) or "" for base in ours]


def silent(modules):
    """Yield what public names of modules leave out: they themselves, and the public methods of classes."""
    seen = set()
    for module in map(import_module, modules):
        for name in module.__all__:
            something = getattr(module, name)
            if callable(something) and (found := missing(something)):
                yield name, found
            for method, docstrings in methods(something) if inspect.isclass(something) else ():
                if method.__qualname__ not in seen and (found := missing(method, docstrings)):
                    yield method.__qualname__, found
                seen.add(method.__qualname__)
