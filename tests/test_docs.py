"""What the documents say is so: the examples run, and what is generated is up to date."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from mpiagg.cli import launch

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text()
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


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *sorted(path.name for path in TOP.glob("docs/*.md"))])
def test_links_lead_somewhere(page):
    path = next(p for p in (TOP / page, TOP / "docs" / page) if p.exists())
    links = re.findall(r"\]\(([^)#:]+)\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_readme_example_runs(number, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number])
    done = subprocess.run(
        launch.command(3, ["-m", "mpi4py", str(script)]),
        env=launch.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_an_example_for_each_face():
    faces = ("mpiagg.Comm(", "mpiagg.allreduce(", "mpiagg.AllReduce(", "mpiagg.DDP(", "mpiagg.simulate(")
    assert all(any(face in example for example in EXAMPLES) for face in faces)
