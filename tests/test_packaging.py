"""The package as it is published: one version everywhere, its types seen by a user's type checker."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import mpiagg

TOP = Path(__file__).parents[1]
PROJECT = (TOP / "pyproject.toml").read_text()
SCRIPT = (Path(__file__).parent / "typed_user.py").read_text()


def versions(citation, changelog):
    """Return the versions that the files tell."""
    return [
        mpiagg.__version__,
        re.search(r"^version: (.*)$", citation, re.MULTILINE)[1],
        re.search(r"^## (\S+)", changelog, re.MULTILINE)[1],
    ]


def test_all_files_tell_one_version():
    citation, changelog = ((TOP / name).read_text() for name in ("CITATION.cff", "CHANGELOG.md"))
    assert len(set(versions(citation, changelog))) == 1
    assert len(set(versions(citation, changelog.replace("## ", "## 9", 1)))) == 2
    assert 'version = { attr = "mpiagg.__version__" }' in PROJECT


def test_the_conda_recipe_needs_what_the_package_needs():
    recipe = (TOP / ".github" / "conda" / "meta.yaml").read_text()
    needed = re.findall(r'^    "([\w-]+>=[\d.]+)"', PROJECT.split("dependencies = [")[1].split("\n]")[0], re.MULTILINE)
    runs = recipe.split("  run:\n")[1].split("\n\n")[0]
    assert len(needed) == 5
    assert re.findall(r"- (.*)", runs) == ["python >=3.10", *(need.replace(">=", " >=") for need in needed)]
    pattern = re.search(r"regex_pattern='(.*)', from", recipe)[1]
    assert re.search(pattern, (TOP / "mpiagg" / "__init__.py").read_text())[1] == mpiagg.__version__


@pytest.mark.parametrize("path", sorted((TOP / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_templates_can_be_read(path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    assert yaml.safe_load(path.read_text())
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load(path.read_text() + "\n  - : [")


@pytest.fixture(scope="module", params=["typed", "untyped"])
def user(request, tmp_path_factory):
    """Return the Python of an environment that has the package as from a wheel, and whether it is typed."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")}))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    untyped = request.param == "untyped"
    shutil.copytree(TOP / "mpiagg", site / "mpiagg", ignore=shutil.ignore_patterns(*["py.typed"] * untyped))
    return python, not untyped


def check(folder, script, command):
    """Return what a type checker says of a script."""
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [*command, "script.py"],
        cwd=folder,
        env={"HOME": str(folder), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


WRONG = SCRIPT.replace("rank: int = comm.rank", "rank: str = comm.rank") + "mpiagg.allreduce(x, root=1)\n"


def test_mypy_sees_the_types(user, tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    python, typed = user
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    status, said = check(tmp_path, SCRIPT, command)
    if not typed:
        assert "module is installed, but missing library stubs or py.typed marker" in said
        return
    assert status == 0, said
    _, said = check(tmp_path, WRONG, command)
    assert len(re.findall(r"error:.*(assignment|call-arg|call-overload)", said)) == 2, said


def test_pyright_sees_the_types(user, tmp_path):
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    python, typed = user
    if not typed:
        pytest.skip("pyright reads untyped packages, too")
    config = {"typeCheckingMode": "strict", "reportMissingModuleSource": "none"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", str(python)]
    status, said = check(tmp_path, SCRIPT, command)
    assert status == 0, said
    status, said = check(tmp_path, WRONG, command)
    assert status == 1
    assert len(re.findall(r"error: .*", said)) == 2, said
