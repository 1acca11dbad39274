"""The recipes that come with Spanwise."""

from __future__ import annotations

from pathlib import Path

import spanwise


def recipes_folder() -> Path:
    """Where they lie: inside an installed wheel, or beside ``src`` in a clone."""
    package = Path(spanwise.__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def list_recipes() -> dict[str, str]:
    """Name → the first comment line of each recipe."""
    found = {}
    for file in sorted(recipes_folder().glob("*.yaml")):
        first = file.read_text(encoding="utf-8").splitlines()[0]
        found[file.stem] = first.removeprefix("#").strip()
    return found


def recipe_text(name: str) -> str:
    """A recipe by name, as it is written."""
    file = recipes_folder() / f"{name.removesuffix('.yaml')}.yaml"
    if not file.is_file():
        raise ValueError(
            f"there is no recipe '{name}'; expected one of {', '.join(list_recipes())}. The name is probably misspelt. "
            "Fix: spanwise recipes list."
        )
    return file.read_text(encoding="utf-8")
