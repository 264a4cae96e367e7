"""CURVE keys: written for the user alone, and refused where others could have read or changed them."""

import os
import stat
from pathlib import Path

import pytest

from vllm_specrollout.cluster import keys
from vllm_specrollout.errors import ConfigError

NAMES = {"server.key", "server.key_secret", "client.key", "client.key_secret"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.write(tmp_path / "keys")
    return tmp_path / "keys"


def test_keys_are_written_for_the_user_alone_whatever_the_mask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written = keys.write(tmp_path / "new" / "keys")
    finally:
        os.umask(before)
    assert {path.name for path in written} == NAMES == set(os.listdir(tmp_path / "new" / "keys"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o600}
    assert stat.S_IMODE(written[0].parent.stat().st_mode) == 0o700


def test_each_end_knows_itself_and_the_other(folder: Path) -> None:
    server, client = keys.load_server(folder), keys.load_client(folder)
    assert server.clients == {client.public} and client.server == server.public
    assert len({server.public, server.secret, client.public, client.secret}) == 4


def test_secrets_are_not_shown(folder: Path) -> None:
    for own in (keys.load_server(folder), keys.load_client(folder)):
        assert own.secret.decode() not in repr(own)


def test_each_end_needs_its_own_files_alone(folder: Path) -> None:
    everything = keys.load_server(folder), keys.load_client(folder)
    (folder / "client.key_secret").rename(folder / "away")
    assert keys.load_server(folder) == everything[0]
    (folder / "away").rename(folder / "client.key_secret")
    (folder / "server.key_secret").unlink()
    (folder / "client.key").unlink()
    assert keys.load_client(folder) == everything[1]


def test_every_listed_client_is_let_in(folder: Path, tmp_path: Path) -> None:
    keys.write(tmp_path / "more")
    (tmp_path / "more" / "client.key").rename(folder / "client-2.key")
    assert len(keys.load_server(folder).clients) == 2


def test_keys_are_not_written_over_without_force(folder: Path) -> None:
    before = keys.load_server(folder)
    with pytest.raises(ConfigError, match="holds keys already: server.key, server.key_secret, client.key"):
        keys.write(folder)
    assert keys.load_server(folder) == before
    keys.write(folder, force=True)
    after = keys.load_server(folder)
    assert after.secret != before.secret and not after.clients & before.clients
    assert set(os.listdir(folder)) == NAMES


def test_one_file_that_is_there_is_enough_to_refuse(folder: Path) -> None:
    for name in NAMES - {"client.key_secret"}:
        (folder / name).unlink()
    with pytest.raises(ConfigError, match="holds keys already: client.key_secret\n"):
        keys.write(folder)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="keys cannot be written to"):
        keys.write(tmp_path / "file" / "keys")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_secret_that_others_may_open_is_refused(folder: Path, mode: int) -> None:
    for load, name in ((keys.load_server, "server.key_secret"), (keys.load_client, "client.key_secret")):
        (folder / name).chmod(mode)
        with pytest.raises(ConfigError, match=f"{name}` can be read by others .mode {mode:o}.*\n\nhint: chmod go-rwx"):
            load(folder)


@pytest.mark.parametrize("name", ["client.key", "."])
def test_a_list_of_clients_that_others_may_change_is_refused(folder: Path, name: str) -> None:
    (folder / name).chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        keys.load_server(folder)


@pytest.mark.parametrize(
    "text", ["", "no key", 'public-key = "short"', "public-key", 'public-key = "' + "~" * 40 + '"']
)
def test_a_file_without_a_key_is_refused(folder: Path, text: str) -> None:
    (folder / "client.key").write_text(text)
    with pytest.raises(ConfigError, match="client.key` holds no CURVE key"):
        keys.load_server(folder)


def test_a_public_key_is_no_secret_one(folder: Path) -> None:
    (folder / "client.key_secret").write_bytes((folder / "client.key").read_bytes())
    with pytest.raises(ConfigError, match="holds no secret key"):
        keys.load_client(folder)


@pytest.mark.parametrize(
    ("load", "missing"),
    [
        (keys.load_server, "server.key_secret"),
        (keys.load_server, "client.key"),
        (keys.load_client, "client.key_secret"),
        (keys.load_client, "server.key"),
    ],
)
def test_a_missing_key_is_named_with_the_way_out(folder: Path, load, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match="specrollout keys DIR") as caught:
        load(folder)
    assert missing.partition(".")[0] in caught.value.cause


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere` cannot be used: No such file"):
        keys.load_server(tmp_path / "nowhere")
