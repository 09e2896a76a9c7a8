"""Every Python snippet of README and docs runs as pasted, under MPI; what a page leaves out is in snippets.py."""

import json
import re
import subprocess

import pytest
import snippets

from mpiagg.launch import start as launch

RUNNER = """
import json, sys, traceback
failed = False
for name, text in json.load(open(sys.argv[1])):
    print("snippet", name, flush=True)
    exec(compile(text, name, "exec"), {"__name__": "__main__"})
print("all ran", flush=True)
"""
EXTRAS = ("torch", "jax", "sklearn")
PAGES = [page for page in snippets.PAGES if page.exists() and snippets.of(page, ("python",))]


def needs_a_gpu(snippet):
    return any(sign in snippet.text for sign in snippets.NEEDS_A_GPU)


def run(programs, folder, ranks=2):
    """Run programs one after the other on all ranks, and return the exit status and what was printed."""
    (folder / "runner.py").write_text(RUNNER)
    (folder / "programs.json").write_text(json.dumps(programs))
    done = subprocess.run(
        launch.command(ranks, ["-m", "mpi4py", str(folder / "runner.py"), str(folder / "programs.json")]),
        env=launch.environment({"MPIAGG_DUMP_DIR": str(folder)}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_run_as_pasted(page, tmp_path):
    programs = []
    for snippet in snippets.of(page, ("python",)):
        text = snippets.program(snippet)
        compile(text, f"{snippet.page}:{snippet.line}", "exec")
        assert text.endswith(snippet.text)
        if needs_a_gpu(snippet):
            continue
        for package in EXTRAS:
            if re.search(rf"^\s*(import|from) (mpiagg\.(horovod\.)?)?{package}\b", text, re.MULTILINE):
                pytest.importorskip(package, reason=f"{package}, an extra, is not installed")
        programs.append((f"{snippet.page}:{snippet.line}", text))
    if not programs:
        pytest.skip("needs a GPU; the snippets are compiled")
    ranks = 3 if page.stem == "README" else 2
    status, said = run(programs, tmp_path, ranks)
    assert status == 0, said
    assert said.count("all ran") == ranks


def test_a_snippet_that_does_not_run_is_found(tmp_path):
    status, said = run([("page:1", "x = 1\n"), ("page:9", "print(y)\n")], tmp_path)
    assert status != 0
    assert "page:9" in said
    assert "name 'y' is not defined" in said


def test_snippets_are_found_where_they_are():
    text = "# Title\n\n```python\na = 1\n```\n\n- item\n\n  ```sh\n  ls\n  ```\n"
    page = snippets.TOP / "README.md"
    assert snippets.of(page, ("python",), text) == [snippets.Snippet("README.md", 4, "a = 1\n")]
    assert [snippet.line for snippet in snippets.of(page, ("sh",), text)] == [10]
