"""`mpctl ui`: a local page that answers while a layout is changed.

answers.py    a job's controls -> its plan, what each control may be, another launcher's flags
layouts.py    pinned layouts compared, and a search
questions.py  the routes, JSON in and out
server.py     who may ask
export.py     a static copy, in which the planner runs in the browser (worker.js)
files.py      ui.html, ui.css, ui.js: the page; what it shows of a plan is drawn as `plan --html` draws it
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mpctl.cli.options import JobSource, TokensOption, with_job


@with_job
def ui(
    job: JobSource,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any that is free.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    tokens: TokensOption = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write a static copy instead: a folder for any host of files, the planner in the browser.",
            show_default=False,
        ),
    ] = None,
    pyodide: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Pyodide for --export, a folder or npm's archive; else downloaded.", show_default=False
        ),
    ] = None,
) -> None:
    """Open a page on this machine: move a layout's controls, see memory, step time and schedule at once.

    mpctl ui --model llama-3-70b --gpus 64xh100 --runtime megatron-core

    It listens on 127.0.0.1 alone; the printed link has a token without which nothing is answered. The page's own
    link is the job. Ctrl-C ends it, and so does an hour without a page.
    """
    from mpctl.cli.ui.answers import controls_of
    from mpctl.cli.ui.server import UiServer

    first = controls_of(job, tokens)
    if export is not None:
        from mpctl.cli.ui.export import write_copy
        from mpctl.render.console import say

        size = write_copy(export, first, pyodide)
        say(f"wrote {export}, {size / 1e6:.1f} MB: try it by python -m http.server -d {export}", stderr=True)
        return
    with UiServer(port, first) as server:
        print(server.link, flush=True)
        if browser:
            import webbrowser

            webbrowser.open(server.link)
        try:
            server.serve_until_idle()
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
