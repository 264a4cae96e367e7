"""The command line: `specrollout COMMAND`. Flags are read in `flags.py`, all commands are listed in `commands.py`."""


def main() -> None:
    """Run a command; a mistake ends in its message, a hint and status 2."""
    from vllm_specrollout.cli.commands import run

    run()
