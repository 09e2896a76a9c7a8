"""Examples in docstrings: run on the ranks that call this, and what is wrong with them in words."""

import doctest
import inspect
import io


def examples_that_fail(name, something, variables):
    """Run the examples in a docstring; return what is wrong with them, in words, and that there are none.

    ``variables`` are what the examples find there; they get a copy. An example that is skipped was not tried: that is
    wrong, too.
    """
    text = inspect.getdoc(something) or ""
    test = doctest.DocTestParser().get_doctest(text, dict(variables), name, None, 0)
    if not test.examples:
        return f"{name} has no example"
    if skipped := [each.source for each in test.examples if each.options.get(doctest.SKIP)]:
        return f"{name} has examples that are skipped: {skipped}"
    said = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(test, out=said.write)
    return said.getvalue()


def public(module, without=()):
    """Return the functions and classes among a module's public names, by their names."""
    found = {name: getattr(module, name) for name in module.__all__ if name not in without}
    return {name: each for name, each in found.items() if callable(each)}
