"""Recognition of text on pages of PDFs that have none, by tesseract or a given function."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ragcache.errors import ConfigurationError, UnreadableDocument

PageOcr = Callable[[bytes], str]
"""Returns the text of a page. The argument is a PNG picture of it."""

TESSERACT = "tesseract"


def resolve_ocr(ocr: Any, seconds: float) -> PageOcr | None:
    """Return the function of the option `ocr`.

    Args:
        ocr: `tesseract`, a function, or None.
        seconds: Most seconds of tesseract for one page.

    Raises:
        ConfigurationError: The option is neither, or tesseract is not installed.
    """
    if ocr is None:
        return None
    if callable(ocr):
        function: PageOcr = ocr
        return function
    if ocr != TESSERACT:
        raise ConfigurationError(f"ocr is {ocr!r}; give 'tesseract', or a function of a picture")
    program = shutil.which(TESSERACT)
    if program is None:
        raise ConfigurationError(
            "ocr='tesseract' needs the program tesseract: apt install tesseract-ocr, and "
            "tesseract-ocr-LANGUAGE for each language"
        )
    return Tesseract(program, seconds)


@dataclass(frozen=True, slots=True)
class Tesseract:
    """The program tesseract, with all of its installed languages."""

    program: str
    seconds: float

    def __call__(self, picture: bytes) -> str:
        """Return the text of a picture.

        Raises:
            UnreadableDocument: tesseract failed, or took too long.
        """
        listed = self._run("--list-langs").decode(errors="replace").splitlines()[1:]
        languages = [each for each in listed if each and each != "osd"]
        chosen = ("-l", "+".join(languages)) if languages else ()
        return self._run("stdin", "stdout", *chosen, picture=picture).decode(errors="replace")

    def _run(self, *arguments: str, picture: bytes = b"") -> bytes:
        try:
            done = subprocess.run(
                [self.program, *arguments],
                input=picture,
                capture_output=True,
                timeout=self.seconds,
                check=True,
                env={**os.environ, "OMP_THREAD_LIMIT": "1"},
            )
        except subprocess.TimeoutExpired as error:
            raise UnreadableDocument(
                f"tesseract takes more than {self.seconds:g} s for a page (option document_seconds)"
            ) from error
        except (OSError, subprocess.CalledProcessError) as error:
            raise UnreadableDocument(f"tesseract failed: {error}") from error
        return done.stdout
