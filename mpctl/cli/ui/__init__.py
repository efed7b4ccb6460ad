"""`mpctl ui`: a local page that answers while a layout is changed.

answers.py   a job's controls -> its plan, what each control may be, a search, another launcher's flags
server.py    who may ask, and the routes
ui.html, ui.css, ui.js   the page; what it shows of a plan is drawn as `plan --html` draws it
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mpctl.cli.options import JobSource, with_job


@with_job
def ui(
    job: JobSource,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any that is free.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Open a page on this machine: move a layout's controls, see memory, step time and schedule at once.

    mpctl ui --model llama-3-70b --gpus 64xh100 --runtime megatron-core

    It listens on 127.0.0.1 alone; the printed link has a token without which nothing is answered. The page's own
    link is the job. Ctrl-C ends it, and so does an hour without a page.
    """
    from mpctl.cli.ui.answers import controls_of
    from mpctl.cli.ui.server import UiServer

    with UiServer(port, controls_of(job)) as server:
        print(server.link, flush=True)
        if browser:
            import webbrowser

            webbrowser.open(server.link)
        try:
            server.serve_until_idle()
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
