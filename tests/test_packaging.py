"""What pip makes of the project: whole archives, and an install that is found from any directory."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement

import kvjax

ROOT = pathlib.Path(__file__).parent.parent


def python(*arguments, cwd) -> str:
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, check=True, stdout=subprocess.PIPE,
                          text=True).stdout


def tracked(folder: str = ".") -> set[str]:
    """Returns the files of a folder that git knows and that are there."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    listed = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


def test_an_editable_install_is_found_beside_a_folder_of_its_name(tmp_path):
    """As a clone's parent directory has one. Made of the project's settings and a package of one line."""
    project, site, clones = tmp_path / "project", tmp_path / "site", tmp_path / "clones"
    for folder in (project / "kvjax", site, clones / "kvjax"):
        folder.mkdir(parents=True)
    for name in ("setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    (project / "kvjax" / "__init__.py").write_text("")
    built = python("-c", "from setuptools import build_meta; print(build_meta.build_editable('.'))", cwd=project)
    zipfile.ZipFile(project / built.split()[-1]).extractall(site)
    found = python("-SE", "-c", f"import site; site.addsitedir({str(site)!r}); import kvjax; print(kvjax.__file__)",
                   cwd=clones)
    assert found.strip() == str(project / "kvjax" / "__init__.py")


def test_a_source_archive_has_every_file_and_nothing_compiled(tmp_path):
    python("setup.py", "-q", "egg_info", "--egg-base", tmp_path, cwd=ROOT)
    archived = set((tmp_path / "kvjax.egg-info" / "SOURCES.txt").read_text().splitlines())
    assert not tracked() - archived - {".gitignore"}
    assert not [name for name in archived if re.search(r"\.(so|pyd|pyc)$", name)]


def test_a_wheel_has_modules_and_models_and_no_sources_of_c(tmp_path):
    python("setup.py", "-q", "build_py", "--build-lib", tmp_path, cwd=ROOT)
    packed = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    unneeded = {name for name in tracked("kvjax") if name.endswith((".c", ".h", "methods/README.md"))}
    assert tracked("kvjax") - packed == unneeded
    assert "kvjax/reference/model.safetensors" in packed and "kvjax/reference_8k/model.safetensors" in packed


def test_wheels_are_built_for_the_oldest_jaxlib_that_they_run_with():
    """Newer ones serve what was compiled for an older, not the other way round (see `kvjax.ops.kernels.register`)."""
    built_with, = (Requirement(line) for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"][
        "requires"] if line.startswith("jaxlib"))
    wanted, = re.findall(r"^    jaxlib>=([\d.]+)$", (ROOT / "setup.cfg").read_text(), re.M)
    major, minor, _ = map(int, wanted.split("."))
    assert wanted in built_with.specifier and f"{major}.{minor + 1}.0" not in built_with.specifier


def test_versions_agree():
    settings, cited = (ROOT / "setup.cfg").read_text(), (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version = (.*)$", settings, re.M) == re.findall(r"^version: (.*)$", cited, re.M)
    assert re.findall(r"^version = (.*)$", settings, re.M) == [kvjax.__version__]
