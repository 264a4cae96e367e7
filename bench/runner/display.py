"""Progress on stderr, results on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_specrollout.errors import SpecRolloutError


def main(app: Callable[[], None]) -> None:
    """Run a command; a mistake ends in its message, a hint and status 2."""
    try:
        app()
    except SpecRolloutError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


class Display:
    """A progress display; a context manager, in which its bars move."""

    def __init__(self) -> None:
        self.out = Console()
        if not self.out.is_terminal:
            # a table squeezed into 80 columns is of no use in a file
            self.out = Console(width=160)
        bars = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=bars,
            transient=True,
            disable=not bars.is_terminal,
        )
        self._bars = bars

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def counter(self, title: str) -> Callable[[int, int], None]:
        """For work that reports (done, total); the bar comes with its first report."""
        bar: list[int] = []

        def update(done: int, total: int) -> None:
            if not bar:
                bar.append(self._progress.add_task(title, total=total))
            self._progress.update(bar[0], completed=done, total=total)  # type: ignore[arg-type]

        return update

    def steps(self, total: int) -> Callable[[str, int], None]:
        """For work in named steps: told (what happens now, or "" for no change; steps done since)."""
        bar = self._progress.add_task("", total=total)

        def update(title: str, done: int) -> None:
            self._progress.update(bar, advance=done, description=title or None)
            if title and not self._bars.is_terminal:
                # a bar cannot be drawn in a file; who waits for minutes still reads what for
                print(f"{title} ...", file=sys.stderr, flush=True)

        return update
