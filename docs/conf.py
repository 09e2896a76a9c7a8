"""The site, from these pages and from docstrings: ``python -m sphinx -W --keep-going docs build/site``."""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

DOCS = Path(__file__).parent
TOP = DOCS.parent
sys.path.insert(0, str(TOP))
import mpiagg  # noqa: E402 - of this checkout

SOURCE = re.findall(r'^Source = "(.*)"$', (TOP / "pyproject.toml").read_text(), re.MULTILINE)[0]
PUBLIC = (
    "mpiagg",
    "mpiagg.optimizers",
    "mpiagg.checkpoints",
    "mpiagg.torch",
    "mpiagg.jax",
    "mpiagg.horovod.torch",
    "mpiagg.horovod.torch.elastic",
)

project = "mpiagg"
author = "the mpiagg developers"
project_copyright = f"2026, {author}"
version = release = mpiagg.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["examples/**"]
nitpicky = True

myst_heading_anchors = 4
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes of a class are a list, and described once
napoleon_preprocess_types = True
# Types in words, what other packages document, and what is below the interfaces.
nitpick_ignore_regex = [("py:.*", r"(?!mpiagg\b).*|mpiagg\.(plans|horovod\.torch\.compression)\..*")]
autodoc_typehints = "none"  # docstrings say what parameters are
autodoc_member_order = "bysource"
add_module_names = False
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"mpiagg {version}"
html_show_sourcelink = False
html_theme_options = {"source_repository": SOURCE, "source_branch": "main", "source_directory": "docs/"}


def link_to_repository(_app: Sphinx, docname: str, content: list[str]) -> None:
    """Let links to files that are no pages of the site lead to the repository."""
    folder = (DOCS / docname).parent

    def target(match: re.Match[str]) -> str:
        name, anchor = match["name"], match["anchor"] or ""
        path = (folder / name).resolve()
        if not path.exists() or (path.is_relative_to(DOCS) and path.suffix == ".md"):
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"]({SOURCE}/{kind}/main/{path.relative_to(TOP)}{anchor})"

    # A link whose text is the file's name has the page's title here.
    content[0] = re.sub(r"\[([\w-]+\.md)\]\(\1(#[^)]*)?\)", r"[](\1\2)", content[0])
    # Not of pictures, which the site copies.
    link = r"(?<!\!\[)(?P<text>)\]\((?P<name>[^)#:\s]+)(?P<anchor>#[^)]*)?\)"
    content[0] = re.sub(link, lambda match: match[0] if match["name"].endswith(".png") else target(match), content[0])


def signature_of_init(
    _app: Sphinx, what: str, _name: str, thing: Any, _options: object, signature: str, returns: str
) -> tuple[str, str]:
    """Show what a class is made of where its ``__new__`` only chooses a subclass."""
    if what == "class" and {"__new__", "__init__"} <= set(vars(thing)):
        parameters = list(inspect.signature(thing.__init__).parameters.values())[1:]
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
        signature = str(inspect.Signature(bare))
    return signature, returns


def meaning_of_data(_app: Sphinx, what: str, name: str, thing: Any, _options: object, lines: list[str]) -> None:
    """Describe a constant by what is written below it in the module that defines it, not by its class."""
    own = name.rpartition(".")[2]
    for module, found in sorted(sys.modules.items()):
        if what == "data" and module.startswith("mpiagg.") and vars(found).get(own) is thing:
            meaning = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", own))
            lines[:] = meaning or lines


def options_as_code(_app: Sphinx, _context: object, lines: list[str]) -> None:
    """Write options that help texts name as code: two hyphens would become a dash."""
    for index, line in enumerate(lines):
        if not line.lstrip().startswith(".. "):
            lines[index] = re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"``\1``", line)


def every_public_name(app: Sphinx, _env: BuildEnvironment) -> list[str]:
    """Warn of public names that no page of the reference has: the build is strict, so that it fails.

    What is public in several modules is described once.
    """
    objects: dict[str, Any] = app.env.get_domain("py").objects  # type: ignore[attr-defined]  # Sphinx's domain of Python has them
    modules = [import_module(module) for module in PUBLIC]
    for module in modules:
        for name in module.__all__:
            thing = getattr(module, name)
            having = [each for each in modules if getattr(each, name, None) is thing]
            if not any(f"{each.__name__}.{name}" in objects for each in having):
                logging.getLogger(__name__).warning("%s.%s is on no page of docs/reference", module.__name__, name)
    return []


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", link_to_repository)
    app.connect("autodoc-process-signature", signature_of_init)
    app.connect("autodoc-process-docstring", meaning_of_data)
    for part in ("description", "options", "epilog"):
        app.connect(f"sphinx-click-process-{part}", options_as_code)
    app.connect("env-updated", every_public_name)
