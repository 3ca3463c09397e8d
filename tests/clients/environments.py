"""Environments of clients: one folder each, outside the tree, kept between runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.clients.table import KEY, PORT, RESOLVED, SERVICE, Client
from tests.conftest import REPOSITORY

NO_TORCH = "torch; python_version < '3'\n"
"""Override of requirements: no client needs torch for asking a service."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An installed client."""

    folder: Path
    """Virtual environment of Python, or the folder that holds `node_modules`."""

    @property
    def programs(self) -> Path:
        """Folder of the programs that the packages bring along."""
        node = self.folder / "node_modules"
        return node / ".bin" if node.exists() else self.folder / "bin"

    def variables(self, home: Path) -> dict[str, str]:
        """Environment variables of a client's process: none of the tests' own settings.

        Args:
            home: Folder that the client takes for the user's home.
        """
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "TERM": "dumb"}

    def run(self, *command: str | Path, home: Path, seconds: float = 180) -> tuple[int, str]:
        """Run a program in the client's home and end whatever it leaves running.

        Args:
            *command: Program and arguments.
            home: Working folder, also the user's home.
            seconds: Time limit.

        Returns:
            Exit status, and the texts of standard output and error.

        Raises:
            subprocess.TimeoutExpired: The time limit has passed.
        """
        with subprocess.Popen(
            command,
            cwd=home,
            env=self.variables(home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=seconds)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, printed


@dataclass(frozen=True, slots=True)
class Environments:
    """The environments of all clients."""

    folder: Path

    @classmethod
    def open(cls) -> Environments:
        """Return the environments in `RAGCACHE_TEST_CLIENTS`, or in the user's cache folder."""
        usual = Path("~/.cache/ragcache-test-clients").expanduser()
        return cls(Path(os.environ.get("RAGCACHE_TEST_CLIENTS", usual)))

    def install(self, client: Client) -> Environment:
        """Install a client unless it is installed; one installation runs at a time.

        Raises:
            subprocess.CalledProcessError: The registry has no such version, or is not reachable.
        """
        wanted = "\n".join((*client.requirements, RESOLVED, sys.version))
        digest = hashlib.sha256(wanted.encode()).hexdigest()[:12]
        folder = self.folder / f"{client.name}-{digest}"
        with self._lock():
            if not (folder / "installed").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                try:
                    (_install_node if client.node else _install_python)(folder, client)
                except BaseException:
                    shutil.rmtree(folder)
                    raise
                (folder / "installed").write_text(wanted, "utf-8")
        return Environment(folder)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _install_python(folder: Path, client: Client) -> None:
    uv = Path(sys.executable).with_name("uv")  # `tools/install.sh` installs it
    python = folder / "bin" / "python"
    _run(uv, "venv", "--quiet", "--seed", "--allow-existing", "--python", sys.executable, folder)
    overrides = folder / "overrides.txt"
    overrides.write_text("" if client.torch else NO_TORCH, "utf-8")
    if client.torch:  # pip finds a CPU build where an index of its settings offers one
        constraints = REPOSITORY / "constraints.txt"
        _run(python, "-m", "pip", "install", "--quiet", "-c", constraints, "torch")
    _run(
        *(uv, "pip", "install", "--quiet", "--python", python),
        *("--exclude-newer", RESOLVED, "--overrides", overrides, *client.requirements),
    )


def _install_node(folder: Path, client: Client) -> None:
    _run(
        "npm", "install", "--silent", "--prefix", folder, "--before", RESOLVED, *client.requirements
    )


def _run(*command: str | Path) -> None:
    variables = os.environ | {"UV_SYSTEM_CERTS": "1", "NODE_ENV": "production"}
    subprocess.run(command, check=True, env=variables, stdin=subprocess.DEVNULL)


def prepare_scripts(
    client: Client, environment: Environment, home: Path, url: str, key: str
) -> Path:
    """Copy a client's files into its home with the service's address and key; return its script."""
    source = client.script.parent
    port = str(free_port())
    for file in client.files:
        text = file.read_text("utf-8").replace(SERVICE, url).replace(KEY, key).replace(PORT, port)
        copy = home / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, "utf-8")
    if client.node:  # node looks for packages next to the script
        (home / "node_modules").symlink_to(environment.folder / "node_modules")
    return home / client.script.name


def free_port() -> int:
    """Return a port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
