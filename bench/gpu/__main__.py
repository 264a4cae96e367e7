"""`python -m vllm_specrollout.bench.gpu`: a mistake ends in its message, a hint and status 2."""

import typer

from ..runner.display import main
from .hour import run

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(run)
    main(app)
