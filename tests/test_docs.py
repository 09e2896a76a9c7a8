"""What the documents say is so: the examples run, and what is generated is up to date."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise, takewhile
from pathlib import Path

import click
import docstrings
import pytest
import snippets

import mpiagg
from mpiagg import cli
from mpiagg.cli.aggregators import AGGREGATORS
from mpiagg.launch import start as launch

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text()
PROJECT = (TOP / "pyproject.toml").read_text()
SOURCE = re.findall(r'^Source = "(.*)"$', PROJECT, re.MULTILINE)[0]
EXTRAS = re.findall(r"^(\w+) = \[", PROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0], re.MULTILINE)
ADDRESS = r"https://[a-z0-9-]+(\.[a-z0-9-]+)+(/[\w./~%#?=&+:-]*)?"
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_quick_start_is_two_commands():
    section = README.split("## Quick start")[1].split("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    commands = block.strip().splitlines()
    assert len(commands) == 2
    assert commands[0].endswith("mpiagg demo")
    assert commands[1].endswith("python -m pytest")


def test_algorithms_page_is_up_to_date():
    made = runpy.run_path(str(TOP / "docs" / "make_algorithms.py"))
    assert (TOP / "docs" / "algorithms.md").read_text() == made["page"](), "run: python docs/make_algorithms.py"


def test_the_guide_lists_every_name():
    listed = (TOP / "docs" / "guide.md").read_text().split("## Every name")[1]
    assert [name for name in mpiagg.__all__ if f"`{name}`" not in listed] == []


def test_there_is_an_example_of_every_name():
    pages = [TOP / "docs" / "examples.md", TOP / "docs" / "sharded.md"]
    code = "".join(snippet.text for page in pages for snippet in snippets.of(page, ("python",)))
    elsewhere = {"SparseLoCo", "DeMo"}  # their docstrings have one
    assert [name for name in mpiagg.__all__ if not re.search(rf"\b{name}\b", code) and name not in elsewhere] == []


def test_pictures_for_students_are_up_to_date():
    made = runpy.run_path(str(TOP / "docs" / "make_how_it_works.py"))
    text = (TOP / "docs" / "how-it-works.md").read_text()
    assert text == made["page"](), "run: python docs/make_how_it_works.py"
    assert text.count("```text\nround") == 2


def test_table_of_aggregations_is_up_to_date():
    made = runpy.run_path(str(TOP / "docs" / "make_aggregations.py"))
    assert (TOP / "docs" / "aggregations.md").read_text() == made["page"](), "run: python docs/make_aggregations.py"


def test_tables_of_performance_are_up_to_date():
    made = runpy.run_path(str(TOP / "docs" / "make_performance.py"))
    assert (TOP / "docs" / "performance.md").read_text() == made["page"](), "run: python docs/make_performance.py"


def test_table_of_tuning_is_up_to_date():
    made = runpy.run_path(str(TOP / "docs" / "make_tuning.py"))
    assert (TOP / "docs" / "tuning.md").read_text() == made["page"](), "run: python docs/make_tuning.py"


def test_table_of_faults_is_up_to_date():
    made = runpy.run_path(str(TOP / "docs" / "make_faults.py"))
    assert (TOP / "docs" / "faults.md").read_text() == made["page"](), "run: python docs/make_faults.py"


def test_every_aggregator_has_learnt():
    """What the saved run shows: at least 0.95, and 0.96 where nothing is rounded or left out."""
    saved = json.loads((TOP / "bench" / "results" / "convergence-n4.json").read_text())
    assert [result["settings"]["aggregator"] for result in saved] == list(AGGREGATORS)
    for result in saved:
        assert result["test_accuracy"] >= (
            0.96 if AGGREGATORS[result["settings"]["aggregator"]].full_precision else 0.95
        )


def text_of(path, cache={}):  # noqa: B006 - files do not change while the tests run
    """Return a page without its code, whose brackets are no links."""
    if path not in cache:
        cache[path] = re.sub(r"`[^`\n]*`", "`code`", snippets.FENCE.sub("", path.read_text()))
    return cache[path]


def anchors(path):
    """Return what a page's headings are called in links, as GitHub and the site make it of their words."""
    found = []
    for heading in re.findall(r"^#+ (.*)$", snippets.FENCE.sub("", path.read_text()), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "]", heading).lower()).strip().replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


def broken_links(path, text):
    """Return the links in a page's text that lead to no file, to no heading, or are no addresses."""
    broken = []
    for link in re.findall(r"\]\(([^)]*)\)", text):
        if link.startswith("http:") or (link.startswith("https:") and not re.fullmatch(ADDRESS, link)):
            broken.append(link)
            continue
        if own := re.fullmatch(rf"{SOURCE}/(?:blob|tree|raw)/main/(.*)", link):
            name, _, anchor = own[1].partition("#")
            target = TOP / name
        elif link.startswith("https:"):
            continue
        else:
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", snippets.PAGES, ids=lambda path: path.parent.name + "/" + path.stem)
def test_links_lead_somewhere(path):
    assert broken_links(path, text_of(path)) == []


@pytest.mark.parametrize(
    "link",
    [
        "docs/nothing.md",
        "docs/guide.md#no-such-heading",
        "#no-such-heading",
        "http://example.org",
        "https://example",
        "https://example.org/a b",
        f"{SOURCE}/blob/main/docs/nothing.md",
        f"{SOURCE}/blob/main/docs/guide.md#no-such-heading",
    ],
)
def test_a_link_that_leads_nowhere_is_found(link):
    page = TOP / "README.md"
    assert broken_links(page, f"[x]({link})") == [link]
    assert broken_links(page, f"[x]({SOURCE}/blob/main/docs/guide.md#plans) [y](docs/guide.md#plans)") == []


def test_links_of_the_readme_work_on_pypi():
    assert [link for link in re.findall(r"\]\(([^)]*)\)", README) if not link.startswith("https://")] == []


UNPUBLISHED = r"pip install [^`;&|#\n]*?(?<![\w/.-])['\"]?mpiagg(?=[\s\[=<>~'\"`]|$)"
"""The package is not on PyPI yet: until then pages install it from the source tree, ``pip install '.[extra]'``."""


def installs_of_the_unpublished(text):
    """Return the commands that would ask PyPI for the package."""
    return [match[0] for match in re.finditer(UNPUBLISHED, text, re.MULTILINE)]


@pytest.mark.parametrize("path", [each for each in snippets.PAGES if each.exists()], ids=lambda path: path.stem)
def test_pages_do_not_install_the_package_from_pypi(path):
    assert installs_of_the_unpublished(path.read_text()) == []


@pytest.mark.parametrize(
    "command",
    ["pip install mpiagg", "pip install 'mpiagg[plot]'", 'pip install -U "mpiagg[demo]"', "pip install mpiagg==0.1"],
)
def test_an_install_of_the_unpublished_package_is_found(command):
    assert installs_of_the_unpublished(f"Run `{command}` first.") != []
    others = "`pip install '.[plot]'`, `pip install ./mpiagg`, pip install mpi4py; mpiagg info"
    assert installs_of_the_unpublished(others) == []


def wrong_in(command):
    """Return what is wrong with the form of a shell snippet: syntax, options, extras, files of this repository."""
    checked = subprocess.run([shutil.which("bash"), "-n"], input=command, capture_output=True, text=True, check=False)
    wrong = [checked.stderr] if checked.returncode else []
    for line in re.sub(r"\\\n", " ", command).splitlines():
        words = shlex.split(line, comments=True)
        extras = ",".join(re.findall(r"(?:mpiagg|\.)\[([\w,]+)\]", line))
        wrong += [f"no extra {extra}" for extra in extras.split(",") if extra not in ("", *EXTRAS)]
        wrong += [
            f"no file {word}"
            for word in words
            if re.fullmatch(r"(slurm|bench|docs|tests|\.ci)/[\w./-]+", word) and not (TOP / word).exists()
        ]
        wrong += [
            f"no module {after}"
            for word, after in pairwise(words)
            if word == "-m" and after.startswith("bench.") and not (TOP / f"{after.replace('.', '/')}.py").exists()
        ]
        for place, word in enumerate(words):
            if word.split("/")[-1] == "mpiagg" and words[place + 1 : place + 2] != ["=="]:
                try:
                    parsed(words[place + 1 :])
                except click.UsageError as error:
                    if not error.format_message().endswith("does not exist."):  # the reader has that file
                        wrong.append(f"mpiagg: {error.format_message()}")
    return wrong


def parsed(words):
    """Have the command line read its words, without carrying anything out."""
    words = list(takewhile(lambda word: word not in ("&&", "||", "|", ";"), words))
    if words and not words[0].startswith("-"):
        command = cli.main.get_command(None, words[0])
        if command is None:
            raise click.UsageError(f"no command {words[0]}")
        command.make_context(words[0], words[1:], resilient_parsing=False)


SHELL = [snippet for page in snippets.PAGES if page.exists() for snippet in snippets.of(page, ("sh", "bash", "shell"))]


@pytest.mark.parametrize("snippet", SHELL, ids=lambda snippet: f"{snippet.page}:{snippet.line}")
def test_shell_snippets_are_well_formed(snippet):
    assert wrong_in(snippet.text) == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("if true", "syntax error"),
        ("pip install 'mpiagg[nonsense]'", "no extra nonsense"),
        ("python bench/nonsense.py", "no file bench/nonsense.py"),
        ("python -m bench.nonsense", "no module bench.nonsense"),
        ("srun mpiagg nonsense", "no command nonsense"),
        ("mpiexec -n 2 mpiagg demo --nonsense", "No such option"),
        ("mpiagg demo --aggregator nonsense", "'nonsense' is not one of"),
    ],
)
def test_a_shell_snippet_that_is_not_is_found(command, words):
    assert words in "\n".join(wrong_in(command))


ALONE = r"(mpiexec -n \d )?mpiagg (simulate|plan-training|info|tune --show)\b(?!.* --tuning)"
"""The commands in shell snippets that need no files, no cluster, and less than a minute."""

COMMANDS = sorted({line for snippet in SHELL for line in snippet.text.splitlines() if re.match(ALONE, line)})


def test_there_are_commands_that_run_as_they_are():
    assert {re.match(ALONE, line)[2] for line in COMMANDS} == {"simulate", "plan-training", "info", "tune --show"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_as_pasted(command, tmp_path):
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["/bin/bash", "-ec", command],
        env=launch.environment(path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") > 3


def run(path, ranks):
    """Run a script on a number of ranks and return what it has printed."""
    done = subprocess.run(
        launch.command(ranks, ["-m", "mpi4py", str(path)]),
        env=launch.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("path", sorted((TOP / "docs" / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_runs(path, ranks):
    assert "loss" in run(path, ranks)


def test_there_is_an_example_for_each_interface():
    interfaces = ("mpiagg.Comm(", "mpiagg.allreduce(", "mpiagg.AllReduce(", "mpiagg.DDP(", "mpiagg.simulate(")
    assert all(any(each in example for example in EXAMPLES) for each in interfaces)


EXAMPLE = """Do something.

Examples
--------
>>> 1 + 1
2
"""


def test_an_example_that_is_wrong_is_found():
    assert docstrings.failed("mpiagg.x", EXAMPLE, {}) == ""
    assert "Expected:\n    3\nGot:\n    2" in docstrings.failed("mpiagg.x", EXAMPLE.replace("\n2", "\n3"), {})
    assert "NameError" in docstrings.failed("mpiagg.x", EXAMPLE.replace("1 +", "one +"), {})
    assert docstrings.failed("mpiagg.x", EXAMPLE.replace("1 +", "one +"), {"one": 1}) == ""


def test_an_example_that_is_skipped_is_found():
    skipped = EXAMPLE.replace("1 + 1", "1 + 1  # doctest: +SKIP")
    assert docstrings.failed("mpiagg.x", skipped, {}) == "mpiagg.x skips: 1 + 1  # doctest: +SKIP\n"
    assert docstrings.failed("mpiagg.bind_device", skipped, {}) == ""


@pytest.mark.parametrize(
    "docstring",
    ["", "Do something.", EXAMPLE.replace(">>> ", ""), EXAMPLE.replace("Examples\n--------\n", "")],
    ids=["nothing", "a sentence", "a section without an example", "an example without a section"],
)
def test_a_docstring_without_an_example_is_found(docstring):
    assert docstrings.has_example(EXAMPLE)
    assert not docstrings.has_example(docstring)


def test_examples_of_methods_and_of_what_a_class_does_not_inherit_are_looked_at():
    class Base:
        """Has an example.

        Examples
        --------
        >>> 1
        1
        """

        __module__ = "mpiagg.base"

        def method(self):
            """Do something."""

        @property
        def value(self):
            """Something."""

        def _hidden(self):
            """Do something."""

    class Derived(Base, dict):
        __module__ = "mpiagg.derived"

    assert docstrings.has_example(docstrings.docstring_of(Base))
    assert not docstrings.has_example(docstrings.docstring_of(Derived))
    assert [name for name, _ in docstrings.members("D", Derived)] == ["D", "D.method", "D.value"]
