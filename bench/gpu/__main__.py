"""`python -m vllm_specrollout.bench.gpu`: a mistake ends in its message, a hint and status 2."""

import sys

import typer

from vllm_specrollout.errors import SpecRolloutError

from .command import run

# the engines' processes import this file again under another name
if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(run)
    try:
        app()
    except SpecRolloutError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
