"""`specrollout keys`: writes key pairs, and does not write over them unasked."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_specrollout.cli import commands as cli
from vllm_specrollout.cluster import keys
from vllm_specrollout.errors import ConfigError


def run(*arguments: object) -> str:
    done = CliRunner().invoke(cli.app, ["keys", *map(str, arguments)])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_it_writes_keys_for_both_ends_and_names_the_files(tmp_path: Path) -> None:
    lines = run(tmp_path / "keys").splitlines()
    assert lines == [
        str(tmp_path / "keys" / name) for name in ("server.key", "server.key_secret", "client.key", "client.key_secret")
    ]
    assert keys.load_client(tmp_path / "keys").server == keys.load_server(tmp_path / "keys").public


def test_it_replaces_keys_only_when_told_to(tmp_path: Path) -> None:
    run(tmp_path)
    before = keys.load_server(tmp_path)
    with pytest.raises(ConfigError, match="--force"):
        run(tmp_path)
    assert keys.load_server(tmp_path) == before
    run(tmp_path, "--force")
    assert keys.load_server(tmp_path).public != before.public
