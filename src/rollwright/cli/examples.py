"""The examples that come with Rollwright: ``rollwright examples`` lists them, and ``rollwright run NAME`` runs one."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from typing import Annotated

import typer

import rollwright
from rollwright.errors import ConfigError
from rollwright.registry import nearest

logger = logging.getLogger("rollwright.cli")

#: Directory of the examples in a wheel, below the environment's prefix (``[tool.setuptools.data-files]``).
INSTALLED = "share/rollwright/examples/"


def examples(
    name: Annotated[str | None, typer.Argument(help="Print the path of this example, to copy it.", show_default=False)] = None,
) -> None:
    """List the examples; `rollwright run NAME key=value …` runs one."""
    shipped = shipped_examples()
    if name is not None:
        typer.echo(_example(name, shipped))
        return
    width = max(map(len, shipped), default=0)
    for each, path in shipped.items():
        typer.echo(f"{each:<{width}}  {_about(path)}")


def find_config(file: str) -> str:
    """Resolve a config file given as a path or the name of an example.

    A file in the working directory takes precedence over an example of the same name.

    Raises:
        ConfigError: a name without an extension is neither a file nor an example.
    """
    shipped = shipped_examples()
    name = file.removesuffix(".yaml")
    if Path(file).is_file():
        if file in shipped:
            logger.warning("%s is the file in %s, not the example of that name", file, Path.cwd())
        return file
    if name in shipped:
        logger.info("%s is the example %s", file, shipped[name])
        return str(shipped[name])
    if Path(file).suffix or Path(file).exists():
        return file  # reading it reports errors
    return str(_example(file, shipped))


def shipped_examples() -> dict[str, Path]:
    """Return the files of the examples by name, from the checkout of this package or from the installed wheel."""
    checkout = Path(rollwright.__file__).parents[2] / "examples"
    if checkout.is_dir() and (checkout.parent / "pyproject.toml").is_file():
        found = {str(path.relative_to(checkout)): path for path in checkout.rglob("*.yaml")}
    else:
        files = importlib.metadata.files("rollwright") or []
        found = {str(each).partition(INSTALLED)[2]: Path(str(each.locate())) for each in files if INSTALLED in str(each)}
    return {name.removesuffix(".yaml"): path.resolve() for name, path in sorted(found.items()) if name.endswith(".yaml")}


def _example(name: str, shipped: dict[str, Path]) -> Path:
    if name not in shipped:
        raise ConfigError(
            f"there is no config file {name} in {Path.cwd()}, and no example of that name; {nearest(name, shipped)} "
            "`rollwright examples` lists them."
        )
    return shipped[name]


def _about(path: Path) -> str:
    """Return the first comment line of a file, without its command and the full stop."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = lines[0].removeprefix("#").strip() if lines and lines[0].startswith("#") else ""
    return first.split(": `")[0].rstrip(":.")
