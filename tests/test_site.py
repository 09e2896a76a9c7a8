"""The site's own functions, in docs/conf.py; CI builds the site itself, and a warning fails the build."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from mpiagg.tables.settings import FORCED

pytest.importorskip("sphinx", reason="Sphinx, in the extra docs, is not installed")
TOP = Path(__file__).parents[1]
CONF = runpy.run_path(str(TOP / "docs" / "conf.py"))


def linked(text, page="slurm"):
    content = [text]
    CONF["link_to_repository"](None, page, content)
    return content[0]


def test_links_out_of_the_site_lead_to_the_repository():
    source = CONF["SOURCE"]
    assert linked("[a](../slurm/README.md#x)") == f"[a]({source}/blob/main/slurm/README.md#x)"
    assert linked("[a](examples)") == f"[a]({source}/tree/main/docs/examples)"
    for same in ("[a](guide.md#plans)", "[a](https://example.org)", "[a](#here)", "![a](algorithms.png)"):
        assert linked(same) == same


def test_a_link_with_the_name_of_its_page_gets_the_title_of_the_page():
    assert linked("see [guide.md](guide.md#plans)") == "see [](guide.md#plans)"


def test_options_in_help_texts_are_code():
    lines = [".. option:: --json <file>", "with --nodes or ``--network``, a well--known -n"]
    CONF["options_as_code"](None, None, lines)
    assert lines == [".. option:: --json <file>", "with ``--nodes`` or ``--network``, a well--known -n"]


def test_a_constant_is_described_where_it_is_defined():
    lines = ["str(object='') -> str"]
    CONF["meaning_of_data"](None, "data", "mpiagg.tables.FORCED", FORCED, None, lines)
    assert lines[0].startswith("The environment variable")


SITE = """
from importlib import import_module
from typing import Any

import mpiagg
from sphinx.util import logging

extensions = ["sphinx.ext.autodoc"]
mpiagg.__all__ = ["simulate"]
PUBLIC = ("mpiagg",)


def setup(app):
    app.connect("env-updated", every_public_name)


"""


def source_of(name):
    """Return the text of a function in conf.py, without the types of its arguments."""
    text = (TOP / "docs" / "conf.py").read_text()
    text = text[text.index(f"def {name}(") :].split("\n\n\n")[0]
    return text.replace("_env: BuildEnvironment", "_env").replace("app: Sphinx", "app")


@pytest.mark.parametrize("page", [".. function:: mpiagg.simulate()\n", "Nothing.\n"])
def test_a_public_name_on_no_page_fails_the_build(tmp_path, page):
    (tmp_path / "conf.py").write_text(SITE + source_of("every_public_name"))
    (tmp_path / "index.rst").write_text(f"Title\n=====\n\n{page}")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TOP)
    assert (done.returncode == 0) == ("simulate" in page), done.stderr
    assert ("mpiagg.simulate is on no page" in done.stderr) == (done.returncode != 0)
