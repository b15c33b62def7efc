# SPDX-License-Identifier: Apache-2.0
"""`podium ui`: a page in the browser that shows runs, live while they go."""

from __future__ import annotations

import signal
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from podium.commands.completion import complete_folder

_CACHE = ".cache"


def ui(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of runs, or of one run.", metavar="FOLDER", autocompletion=complete_folder),
    ] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8700,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than this machine's own need the token that is printed.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
) -> None:
    """Show runs in the browser: curves, timeline, rollouts. Nothing leaves this machine."""
    from podium.ui.server import PageServer

    server = PageServer(folder, host=host, port=port, cache=_cache_of(folder))
    server.prepare()
    typer.echo(f"{folder}: open {server.url} (Ctrl-C ends it)")
    if server.access.token is not None:
        typer.echo("Everybody who has this address can read all runs of the folder. The connection is not encrypted.")
    elif browser:
        webbrowser.open(server.url)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell in the background ignores the first
        signal.signal(number, signal.default_int_handler)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        typer.echo("ended")
    finally:
        server.close()


def _cache_of(folder: Path) -> Path:
    """The cache of the folder of runs, which is also where training keeps its own."""
    is_one_run = any((folder / name).is_file() for name in ("run.json", "pipeline.json"))
    return (folder.absolute().parent if is_one_run else folder) / _CACHE
