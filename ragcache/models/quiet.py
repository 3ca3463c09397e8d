"""Silence while transformers loads a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, NOTSET, getLogger

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
