"""The scripts of `benchmarks/` are imported by their names."""

import sys

from tests.conftest import REPOSITORY

sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "benchmarks" / "papers")]
