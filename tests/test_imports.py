"""The order of the house: a module imports only what stands above it, and says what it receives and gives.

Receives: the source text of every module; nothing is imported but the package's front door.
Gives: the file and line that break the order, or a docstring that does not tell the flow.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import clipwise

ROOT = Path(clipwise.__file__).parent
ORDER = (
    "types elsewhere plain jit cpu_noise gpu_noise randomness data sampling records methods engine noise step "
    "postprocess accounting trained ranks models diagnostics advice report losses draws passes reading self_test "
    "refusals guard private start training audit experiments config bench cli"
).split()
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def home(dotted: str) -> str:
    """The module or package, directly under clipwise, that a dotted name belongs to."""
    return dotted.removeprefix("clipwise").lstrip(".").split(".")[0]


def imports(node: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Every import of clipwise at or below a node, in functions too, but not under ``if TYPE_CHECKING``."""
    below = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        below = list(node.orelse)
    elif isinstance(node, ast.Import):
        yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "clipwise")
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level:  # a relative import
            parts = package.split(".")
            module = ".".join([*parts[: len(parts) - node.level + 1], module]).rstrip(".")
        if module == "clipwise":  # from clipwise import methods
            yield from ((node.lineno, f"clipwise.{alias.name}") for alias in node.names)
        elif module.startswith("clipwise."):
            yield node.lineno, module
    for child in below:
        yield from imports(child, package)


def package_of(file: str) -> str:
    return ".".join(["clipwise", *Path(file).parent.parts])


def test_every_module_has_a_place_in_the_order() -> None:
    found = {home(".".join(Path(file).with_suffix("").parts)) for file in FILES} - {"__init__", "__main__"}
    assert found <= set(ORDER), f"no place for {sorted(found - set(ORDER))}"
    assert set(ORDER) - {"config", "bench", "cli"} <= found


@pytest.mark.parametrize("file", [file for file in FILES if file not in ("__init__.py", "__main__.py")])
def test_a_module_imports_only_what_stands_above_it(file: str) -> None:
    own = home(".".join(Path(file).with_suffix("").parts))
    allowed = {*ORDER[: ORDER.index(own)], own, "__version__"}  # inside its own package a file may import any other
    wrong = [
        f"src/clipwise/{file}:{line} imports {name}, which does not stand above {own}"
        for line, name in imports(ast.parse((ROOT / file).read_text()), package_of(file))
        if home(name) not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_the_import_check_sees_what_it_must() -> None:
    text = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import clipwise.cli
else:
    import clipwise.step
def f():
    from clipwise import methods, noise
    from clipwise.records.kinds import Dense
    from ..data import load
"""
    found = sorted(home(name) for _, name in imports(ast.parse(text), "clipwise.records"))
    assert found == ["data", "methods", "noise", "records", "step"]


@pytest.mark.parametrize("file", FILES)
def test_the_first_lines_of_a_module_say_what_it_receives_and_gives(file: str) -> None:
    text = (ROOT / file).read_text()
    head = text.splitlines()[:6]
    assert head and head[0].startswith('"""') and len(head[0]) > 10, f"src/clipwise/{file}: one title line first"
    for word in ("Receives:", "Gives:"):
        assert any(line.startswith(word) for line in head), f"src/clipwise/{file}: no line {word!r} among the first six"


@pytest.mark.parametrize(
    "statement", ["import clipwise", "from clipwise import calibrate, epsilon, Ledger, InputError, Refused"]
)
def test_what_needs_no_torch_does_not_import_it(statement: str) -> None:
    heavy = ("torch", "dp_accounting", "scipy", "sklearn")
    code = f"import sys; {statement}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_resolves_and_is_listed() -> None:
    assert len(clipwise.__all__) == len(set(clipwise.__all__)) and set(clipwise.__all__) <= set(dir(clipwise))
    for name in clipwise.__all__:
        assert getattr(clipwise, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = clipwise.no_such_name


def test_type_checkers_see_the_same_names_as_programs() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    seen = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.If)
        for part in node.body
        if isinstance(part, ast.ImportFrom)
        for alias in part.names
    }
    assert seen == set(clipwise.__all__)


def test_nothing_in_the_package_is_unfinished() -> None:
    for file in FILES:
        text = (ROOT / file).read_text()
        for word in ("TODO", "FIXME", "XXX", "NotImplementedError"):
            assert word not in text, f"src/clipwise/{file} has {word}"
    assert not [file for file in FILES if Path(file).name in ("utils.py", "helpers.py", "misc.py")]
