"""The command ``rollwright``: a table of commands, each imported only when it is called, and the handling of failures.

A failed command exits with 1 (2 for wrong arguments, 130 for Ctrl-C), prints the cause in one line on stderr, and writes the
traceback to a log file that the line names.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Sequence

import typer

from rollwright.cli.failures import report
from rollwright.tracking.logging import getLogger

#: Name of a command -> ``module:attribute`` of its function or ``typer.Typer``, and its help text.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("rollwright.cli.run:run", "Carry out a config: train, warm up, evaluate, whatever its stages say."),
    "examples": ("rollwright.cli.examples:examples", "List the examples; `rollwright run NAME` runs one."),
    "eval": ("rollwright.cli.run:evaluate", "Score a model on a dataset, greedy and sampled."),
    "sequences": ("rollwright.cli.sequences:sequences", "Generate and score responses, and write them as a table."),
    "replay": ("rollwright.cli.replay:replay", "Run recorded episodes again, without a model."),
    "view": ("rollwright.cli.view:view", "Look at runs in the browser: every token, group, weight update and reason."),
    "check": ("rollwright.cli.check:check", "Check which files of a run are intact, and what the others lack."),
    "check-tasks": ("rollwright.cli.check_tasks:check_tasks", "Check task folders: the solution scores 1, doing nothing less."),
    "config": ("rollwright.cli.config:app", "Show, check and describe configs."),
    "model": ("rollwright.cli.new:models", "Make models."),
    "new": ("rollwright.cli.new:app", "Write files to begin with: a workflow, its config and its test."),
    "plan": ("rollwright.cli.plan:plan", "Show what a run takes on GPUs, before there are any: memory, places, publications."),
    "doctor": ("rollwright.cli.doctor:doctor", "Look at this machine: what a run has here, and what to do about the rest."),
    "serve-model": (
        "rollwright.cli.serve:serve_model",
        "Serve a model: the built-in engine over SGLang's and the OpenAI protocol.",
    ),
    "export": ("rollwright.cli.export:export", "Export a run to Inspect, W&B or JSON lines; merge a LoRA adapter."),
    "push": ("rollwright.cli.push:push", "Upload a checkpoint to the Hugging Face Hub."),
    "retrieve": ("rollwright.cli.serve:retrieve", "Serve a corpus to search agents."),
    "serve-boxes": ("rollwright.cli.serve:serve_boxes", "Lend boxes of this machine to runs on others."),
}


def build_app(chosen: str | None) -> typer.Typer:
    """Build the application, which lists every command but imports only ``chosen`` (``"*"`` imports all, None imports none)."""
    app = typer.Typer(
        help="Reinforcement learning for language-model agents. The unit is the workflow: the code of one episode.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", help="Print the version and end.", is_eager=True, callback=_print_version
        ),
    ) -> None:
        pass

    for name, (target, text) in COMMANDS.items():
        is_chosen = chosen in (name, "*")
        loaded = pkgutil.resolve_name(target) if is_chosen else lambda: None
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=name, help=text)
        else:
            app.command(name, help=None if is_chosen else text, short_help=text)(loaded)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: the arguments; those of the process if None.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # so that a config can name the user's own modules, as with python -m
    getLogger()  # attaches the handlers, so that messages of all modules appear
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    completing = "_ROLLWRIGHT_COMPLETE" in os.environ
    try:
        build_app("*" if completing else chosen)(args=arguments, prog_name="rollwright")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # all other failures become a message and an exit status
        report(error)
        return 1
    return 0


def _print_version(wanted: bool) -> None:
    if wanted:
        from rollwright import __version__

        typer.echo(f"rollwright {__version__}")
        raise typer.Exit
