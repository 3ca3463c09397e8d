"""Names of the model hub, and a hub that does not answer.

The hub's client tries for a minute to reach a hub that is away. So it is asked once before, and
models are read from its cache on this machine if it does not answer.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from ragcache.errors import ModelNotFound

_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_HUB_SECONDS = 3.0  # that the hub has to answer


def hub_answers() -> bool:
    """Whether the hub can be reached."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return not constants.HF_HUB_OFFLINE
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        with socket.create_connection((str(hub.hostname), port), _HUB_SECONDS):
            return True
    except OSError:
        return False


def is_cached_name(source: str) -> bool:
    """Whether a model can only be read from the hub's cache: it is no folder, and the hub does not
    answer."""
    return not Path(source).is_dir() and not hub_answers()


def local_or_hub(source: str) -> str:
    """Return the folder of a checkpoint or, while the hub answers, the name of a hub model.

    Without the hub, a model is looked for in the hub's cache on this machine. Raises
    `ModelNotFound`.
    """
    is_folder = Path(source).is_dir()
    if is_folder and not Path(source, "config.json").is_file():
        raise ModelNotFound(
            f"cannot load the model {source!r}: the folder has no config.json. Give a folder with "
            "config.json, weights and tokenizer, the name of a hub model, or a GGUF file"
        )
    if is_folder or not _HUB_NAME.fullmatch(source) or hub_answers():
        return source
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(source, local_files_only=True))
    except LocalEntryNotFoundError:
        raise ModelNotFound(
            f"cannot load the model {source!r}: there is no such folder, the model hub does not "
            "answer, and its cache on this machine has no such model. Give a folder with "
            "config.json, weights and tokenizer, or a GGUF file"
        ) from None
