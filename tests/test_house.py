"""The house itself: rooms import only what lies below them, and importing spanwise stays light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import spanwise

SOURCE = Path(spanwise.__file__).parent
# From the ground up; a room imports its own floor's rooms and everything below.
FLOORS = [
    {"spans", "batch", "loss_parts", "loading"},
    {"dataplane", "teachers"},
    {"xtoken", "vlm", "mlm"},
    {"report"},
    {"train"},
    {"demo"},
    {"cli"},
]
HEIGHT = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ROOMS = sorted(HEIGHT)


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(file: Path) -> set[str]:
    """Rooms by their full names; the package's own names, which would hide a room, are for those outside."""
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} imports relatively"
            if node.module == "spanwise" and file.parent != SOURCE:
                hidden = {alias.name for alias in node.names} - {*ROOMS, "__version__"}
                assert not hidden, f"{file} imports {hidden} from the package, not from a room"
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [
                f"{node.module}.{alias.name}" if node.module == "spanwise" else node.module for alias in node.names
            ]
        rooms |= {name.split(".")[1] for name in names if name.startswith("spanwise.")}
    return rooms & set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_nothing_from_above(room):
    files = [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").is_file() else sorted((SOURCE / room).rglob("*.py"))
    assert files, f"there is no room {room}"
    upward = {
        f"{file.relative_to(SOURCE)} imports {other}"
        for file in files
        for other in imported_rooms(file)
        if other != room and HEIGHT[other] > HEIGHT[room]
    }
    assert not upward


def test_every_file_is_in_a_known_room():
    rooms = {room_of(file) for file in SOURCE.rglob("*.py")} - {"__init__"}
    assert rooms == set(ROOMS)


def test_every_room_imports_alone():
    code = "import importlib, sys; importlib.import_module('spanwise.' + sys.argv[1])"
    for room in ROOMS:
        result = subprocess.run([sys.executable, "-W", "error", "-c", code, room], capture_output=True, text=True)
        assert result.returncode == 0, f"import spanwise.{room} fails alone:\n{result.stderr}"


def test_importing_spanwise_loads_neither_transformers_nor_ray():
    code = (
        "import sys, json, spanwise; spanwise.__all__; "
        "print(json.dumps([m for m in ('transformers', 'ray', 'datasets', 'PIL', 'tensordict') if m in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []


def test_no_left_overs():
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        assert text.lstrip().startswith(('"""', "from __future__")), f"{file} does not say what it is"
        for word in (
            "TODO",
            "FIXME",
            "raise NotImplementedError\n",
            "weights_only=False",
            "pickle.loads",
            "yaml.load(",
        ):
            assert word not in text, f"{file} holds {word}"
        assert file.name not in ("utils.py", "helpers.py")


def test_the_public_names_are_these():
    """A change here is a change of the API: it belongs into CHANGELOG.md."""
    assert sorted(spanwise.__all__) == [
        "AlignmentBatch",
        "BatchedDataDict",
        "CrossTokenizerCollator",
        "LossParts",
        "Ratio",
        "TeacherScores",
        "TokenAligner",
        "__version__",
        "for_trainer",
        "load_model",
        "load_tokenizer",
        "model_inputs",
    ]
    for name in spanwise.__all__:
        assert getattr(spanwise, name) is not None
