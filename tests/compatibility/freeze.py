"""Freezes the version of this tree: a state folder, recordings of REST, and the public signatures.

`python -m tests.compatibility.freeze` writes the folder `tests/compatibility/VERSION`. A released
version stays as it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from ragcache import RagCache, SourceDocument, __version__
from tests.compatibility.replay import replay
from tests.conftest import REPOSITORY

HOME = Path(__file__).parent
STATE, RECORDINGS, SIGNATURES = "state.tar.xz", "recordings.json", "signatures.pyi"
NOTES = {
    "keys.md": "The spare key of the boathouse hangs in the red cupboard.",
    "boats.md": "The survey boat Pipit is moored at the north quay.",
}
SCHEMA = '<schema name="boats"><module name="pipit">Pipit is moored at the quay.</module></schema>'
VOLATILE = frozenset(
    """
    conversation_bytes created created_at finished_at hits id last_used nbytes started_at
    system_fingerprint timings usage_bytes used_at used_bytes
    """.split()
)
"""Fields whose type is recorded, and no value: times, names made by chance, measurements."""


def make_state(folder: Path) -> str:
    """Make a state folder with something in its main tables, and return the secret of its key."""
    documents = [
        SourceDocument(name, text, metadata={"kind": name.partition(".")[0]})
        for name, text in NOTES.items()
    ]
    with RagCache.open(folder, embedding="none", force_modes=True, kv_dtype="int8") as rag:
        rag.ingest("notes", documents)
        rag.collections.set_description("notes", "Keys and boats of a survey.")
        rag.schemas.add(SCHEMA)
        secret = rag.keys.create("frozen", role="admin")[1]
        rag.ask("Where is the survey boat?", collection="notes")
    return secret


def generalize(value: Any, *, is_volatile: bool = False) -> Any:
    """Replace values of volatile fields by the names of their types."""
    if isinstance(value, dict):
        return {
            name: generalize(each, is_volatile=is_volatile or name in VOLATILE)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [generalize(each, is_volatile=is_volatile) for each in value]
    return f"<{type(value).__name__}>" if is_volatile and value is not None else value


def unpack(version: Path, folder: Path) -> Path:
    """Copy the frozen state folder of a version, and return the copy."""
    with tarfile.open(version / STATE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "state"


def freeze(version: Path) -> None:
    """Write the files of a version."""
    version.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        state = Path(scratch, "state")
        secret = make_state(state)
        with tarfile.open(version / STATE, "w:xz", preset=9) as archive:
            archive.add(state, "state")
        recorded = {"secret": secret} | replay(unpack(version, Path(scratch, "copy")), secret)
    text = json.dumps(generalize(recorded), indent=1, ensure_ascii=False)
    (version / RECORDINGS).write_text(f"{text}\n", encoding="utf-8")
    subprocess.run(
        [sys.executable, "tools/signatures.py", "--write", str(version / SIGNATURES)],
        cwd=REPOSITORY,
        check=True,
    )


if __name__ == "__main__":
    freeze(HOME / __version__)
