"""``rollwright view``: pages over the directories of runs."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rollwright.errors import ConfigError

#: Default port.
PORT = 7111


def view(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Directories of runs, or above them. Default: runs.")
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Interface to bind. Any other than loopback requires a token, which is part of the printed address."),
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help=f"Port to listen on; default: {PORT}, or a free one.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Additional host name to accept, such as that of a reverse proxy (repeatable)."),
    ] = None,
    token: Annotated[
        bool,
        typer.Option("--token", help="Require a token on this machine too, because its other accounts can reach the port."),
    ] = False,
    export: Annotated[Path | None, typer.Option(help="Write one HTML file that needs no server or network, then exit.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Samples in the file of --export: half best, half worst.")] = 40,
    browser: Annotated[bool, typer.Option(help="Open the page if there is a desktop.")] = True,
    terminal: Annotated[bool, typer.Option("--terminal", help="Show the runs on this terminal, without a browser.")] = False,
) -> None:
    """Look at runs in the browser or on the terminal: curves, groups, every token, weight updates and reasons.

    Nothing is written to a run. It works while a run trains, after a crash, and on a copied directory.
    """
    places = runs or [Path("runs")]
    for place in places:
        if runs and not place.is_dir():
            raise ConfigError(f"{place} is no directory: name the directory of a run, or one above it.")
    if terminal:
        if export is not None or port is not None or allowed_host or host != "127.0.0.1":
            raise ConfigError("--terminal serves no pages: leave out --host, --port, --allowed-host and --export.")
        if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
            raise ConfigError("--terminal needs a terminal: over ssh, `ssh -t host rollwright view --terminal` has one.")
    try:
        if terminal:
            from rollwright.viewer.terminal import show

            show(places)
            return
        from rollwright.inference.server import service
        from rollwright.viewer import report, server
    except ModuleNotFoundError as error:
        raise ConfigError(f"rollwright view needs the package {error.name}: pip install 'rollwright[view]'.") from error

    if export is not None:
        written = report.write_report(places, export, samples)
        typer.echo(f"{written} ({written.stat().st_size / 2**20:.1f} MiB): open it in a browser")
        return
    settings = server.settings_of(host, PORT if port is None else port, allowed_host or [], token)
    try:
        sockets = service.bind(settings)
    except ConfigError:
        if port is not None:
            raise
        settings.port = 0
        sockets = service.bind(settings)
    app = server.make_app(places, settings)
    for listener in sockets:
        listener.listen()  # clients that open the address immediately now wait instead of being refused
    address = service.url_of(settings) + server.first_page(app, settings)
    typer.echo(f"{address}  (Ctrl-C ends)")
    if browser and _has_desktop():
        webbrowser.open(address)
    service.run(app, settings, sockets)


def _has_desktop() -> bool:
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
