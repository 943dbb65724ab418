"""``rollwright new``: files to begin with."""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def new() -> None:
    """Write files to begin with."""


@app.command()
def workflow(
    name: Annotated[str, typer.Argument(help="Name in lower case, such as `two_readers`; files and class are named after it.")],
    directory: Annotated[Path, typer.Option(help="Where the files are written; made where it is missing.")] = Path("."),
) -> None:
    """Write a workflow, registered under NAME, a config that trains it, and a test that passes.

    The config runs at once, from a model made on the spot: `rollwright run NAME.yaml`.
    """
    from rollwright.cli.workflow_template import CONFIG, TEST, WORKFLOW
    from rollwright.errors import ConfigError

    _check_name(name, directory)
    class_name = "".join(part.capitalize() for part in name.removesuffix("_workflow").split("_")) + "Workflow"
    files = {f"{name}.py": WORKFLOW, f"{name}.yaml": CONFIG, f"test_{name}.py": TEST}
    if existing := [file for file in files if (directory / file).exists()]:
        raise ConfigError(f"{directory / existing[0]} exists; choose another name or directory, nothing is overwritten.")
    directory.mkdir(parents=True, exist_ok=True)
    for file, template in files.items():
        text = template.replace("<name>", name).replace("<Class>", class_name)
        (directory / file).write_text(text, encoding="utf-8")
    inside = "" if directory == Path(".") else f"cd {directory} && "
    typer.echo(f"{directory / f'{name}.py'}: {class_name}, the code of an episode: begin here")
    typer.echo(f"{directory / f'test_{name}.py'}: {inside}python -m pytest test_{name}.py")
    typer.echo(f"{directory / f'{name}.yaml'}: {inside}rollwright run {name}.yaml")


def _check_name(name: str, directory: Path) -> None:
    from rollwright.errors import ConfigError
    from rollwright.workflows.registry import WORKFLOWS

    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name.startswith("_"):
        raise ConfigError(
            f"{name!r} is no name for a Python module: use lower case, digits and underscores, as in two_readers."
        )
    if name in WORKFLOWS:
        raise ConfigError(f"a workflow {name!r} is built in; choose another name.")
    found = importlib.util.find_spec(name) if name not in sys.modules else sys.modules[name].__spec__
    # A directory without an __init__.py hides nothing, and is hidden by nothing that is not meant to.
    origin = found.origin if found is not None else None
    if origin is not None and Path(origin).parent not in (Path.cwd(), directory.resolve()):
        raise ConfigError(f"a module {name!r} is installed already, which {name}.py would hide; choose another name.")
