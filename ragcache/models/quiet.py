"""Silence while transformers loads a model, and a hub that does not answer is asked once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, NOTSET, getLogger
from urllib.parse import urlsplit
from urllib.request import getproxies

_HUB_SECONDS = 3.0  # that the model hub has to answer
_LOUD = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Holds back transformers' progress bars and advice while a model loads, and what torchao says
    of kernels for other machines when transformers imports it."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loud = [name for name in _LOUD if not getLogger(name).level]
    for name in loud:
        getLogger(name).setLevel(ERROR)
    try:
        yield
    finally:
        for name in loud:
            getLogger(name).setLevel(NOTSET)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def hub_answers() -> bool:
    """Whether the model hub can be reached. Asked once: its client tries again for a minute."""
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
