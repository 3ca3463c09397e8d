"""A stand-in for a container: namespaces of Linux with a read-only root file system."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

_SCRIPT = """
for place in /tmp /dev/shm; do mount --bind "$place" "$place"; done
mount --options remount,ro,bind /
exec unshare --user --map-user=10001 --map-group=10001 -- "$@"
"""


@cache
def read_only_root() -> tuple[str, ...]:
    """Words before a command that run it as the user 10001, without capabilities, where only /tmp
    and /dev/shm can be written. No words where namespaces cannot be made."""
    namespaces = ("unshare", "--user", "--map-root-user", "--mount", "--")
    prefix = (*namespaces, "sh", "-euc", _SCRIPT, "sh")
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"]).returncode:
        return ()
    probe = subprocess.run([*prefix, "touch", "/probe"], capture_output=True, text=True)
    assert "Read-only file system" in probe.stderr
    return prefix
