"""The order of packages: imports go down, never up or around."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Each package may import those above it in this list, and itself. A module that is not in a package is named by its
# own.
ORDER = (
    "errors", "typing", "_files", "_native", "_validate", "ops", "models", "store", "cache", "methods", "inference",
    "llm", "attend", "calibration", "eval", "kvjax",
)
STORE = ("native", "geometry", "prompt", "stats", "interface", "transaction", "host", "format", "io", "flash", "tools")


def name_of(path: pathlib.Path) -> str:
    """Returns the dotted name of a module's file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in (ROOT / "kvjax").rglob("*.py")}
NAMES = sorted(MODULES)


def imported(tree: ast.AST) -> set[str]:
    """Returns the modules that a syntax tree imports: of this library by their full names, of others the first part."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in full}
    return {name if name.split(".")[0] == "kvjax" else name.split(".")[0] for name in found}


USES = {name: imported(ast.parse(path.read_text())) for name, path in MODULES.items()}


def package_of(name: str, depth: int = 1) -> str:
    """Returns the package of a module, one level below `kvjax`, or two with `depth=2`."""
    parts = name.split(".")
    return parts[depth] if len(parts) > depth else parts[-1]


@pytest.mark.parametrize("name", NAMES)
def test_imports_go_down(name):
    floor = ORDER.index(package_of(name))
    above = {used for used in USES[name] if used.startswith("kvjax") and ORDER.index(package_of(used)) > floor}
    assert not above


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("kvjax.store.")])
def test_imports_go_down_in_the_store(name):
    floor = STORE.index(package_of(name, 2))
    used = {used for used in USES[name] if used.startswith("kvjax.store.")}
    assert not {one for one in used if STORE.index(package_of(one, 2)) > floor}


def test_no_circle():
    """Takes away what imports nothing that is left, until nothing is left."""
    left = {name: {used for used in uses if used in MODULES and used != name} for name, uses in USES.items()}
    while left:
        free = {name for name, uses in left.items() if not uses & left.keys()}
        assert free, f"these import each other: {sorted(left)}"
        left = {name: uses for name, uses in left.items() if name not in free}


def test_the_store_does_without_jax():
    assert not {name for name in NAMES if name.startswith("kvjax.store") and USES[name] & {"jax", "jaxlib", "flax"}}
    assert not {name for name in NAMES if name.startswith("kvjax.store") and "kvjax.typing" in USES[name]}


def test_methods_know_no_store():
    assert not {name for name in NAMES if name.startswith("kvjax.methods")
                and any(used.startswith("kvjax.store") for used in USES[name])}


def test_few_modules_are_in_no_package():
    assert len(list((ROOT / "kvjax").glob("*.py"))) <= 8


def test_no_two_classes_have_one_name():
    names = [node.name for path in MODULES.values() for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.ClassDef)]
    assert sorted(names) == sorted(set(names))
