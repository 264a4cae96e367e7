"""The CURVE keys of both ends, in a directory: written once, read by each end. No sockets.

server.key_secret   the verifier's, at its host alone
server.key          its public half, at both
client.key_secret   the drafter's, at its host alone
client.key          its public half, at both; the verifier lets in every `client*.key` of its directory
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from vllm_specrollout.errors import ConfigError, UnsupportedError

_NAMES = [end + suffix for end in ("server", "client") for suffix in (".key", ".key_secret")]
_HINT = "make keys with `specrollout keys DIR`, and copy to each host what docs/concepts/mailbox.md lists"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What the end that serves needs; keys as Z85 text."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: frozenset[bytes]  # public keys that are let in


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What the end that connects needs; keys as Z85 text."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes  # public


def write(folder: Path, *, force: bool = False) -> list[Path]:
    """Make new key pairs for both ends, readable by the user alone.

    Raises:
        ConfigError: some are there already and `force` is False, or the folder cannot be written.
        UnsupportedError: this libzmq has no CURVE.
    """
    _check_curve()
    there = [name for name in _NAMES if (folder / name).exists()]
    if there and not force:
        cause = f"`{folder}` holds keys already: {', '.join(there)}"
        raise ConfigError(cause, "choose another directory, or give `--force`: ends with the old keys are locked out")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # pyzmq writes with the user's usual mode, so it writes where nobody else can look
        with tempfile.TemporaryDirectory(dir=folder, prefix=".keys-") as private:
            for end in ("server", "client"):
                zmq.auth.create_certificates(private, end)
            for name in _NAMES:
                os.chmod(Path(private, name), 0o600)
                os.replace(Path(private, name), folder / name)
    except OSError as error:
        cause = f"keys cannot be written to `{folder}`: {error.strerror or error}"
        raise ConfigError(cause, "choose a directory that you may write") from None
    return [folder / name for name in _NAMES]


def load_server(folder: Path) -> ServerKeys:
    """The keys of the end that serves.

    Raises:
        ConfigError: one is missing or no key, or others may read what is secret or write the rest.
        UnsupportedError: this libzmq has no CURVE.
    """
    own = _load_own(folder, "server")
    clients = frozenset(_load(path)[0] for path in sorted(folder.glob("client*.key")))
    if not clients:
        raise ConfigError(f"`{folder}` lists no client: it has no `client*.key`", _HINT)
    return ServerKeys(*own, clients)


def load_client(folder: Path) -> ClientKeys:
    """The keys of the end that connects.

    Raises:
        as `load_server`.
    """
    return ClientKeys(*_load_own(folder, "client"), _load(folder / "server.key")[0])


def _load_own(folder: Path, end: str) -> tuple[bytes, bytes]:
    _check_curve()
    _check_mode(folder, 0o022)
    path = folder / f"{end}.key_secret"
    public, secret = _load(path, 0o077)
    if secret is None:
        raise ConfigError(f"`{path}` holds no secret key", _HINT)
    return public, secret


def _load(path: Path, forbidden: int = 0o022) -> tuple[bytes, bytes | None]:
    _check_mode(path, forbidden)
    try:
        public, secret = zmq.auth.load_certificate(path)
        if all(len(z85.decode(key)) == 32 for key in (public, secret) if key is not None):
            return public, secret
    except (OSError, ValueError, KeyError, IndexError):
        pass
    raise ConfigError(f"`{path}` holds no CURVE key", _HINT)


def _check_mode(path: Path, forbidden: int) -> None:
    """Refuse what is missing, another user's, or open to others in a forbidden way."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be used: {error.strerror or error}", _HINT) from None
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"`{path}` is user {status.st_uid}'s, not yours", "own the files, or make new keys")
    if status.st_mode & forbidden:
        what = "read" if forbidden & 0o044 else "written"
        cause = f"`{path}` can be {what} by others (mode {status.st_mode & 0o777:o})"
        raise ConfigError(cause, f"chmod {'go-rwx' if forbidden & 0o044 else 'go-w'} {path}")


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise UnsupportedError("this libzmq was built without CURVE", "pip install pyzmq: its wheels have it")
