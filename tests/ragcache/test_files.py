from __future__ import annotations

import io
from pathlib import Path

from ragcache.files import write_parts


class ShortWrites(io.FileIO):
    """A file that takes at most 1,000 bytes of a write, as a nearly full disk may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self.offered: list[int] = []

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        self.offered.append(len(data))
        return super().write(data[:1000])


def test_parts_are_written_whole_and_in_small_pieces(tmp_path: Path) -> None:
    parts = [bytes([number]) * size for number, size in enumerate((0, 3, 200_000, 131_072, 7))]
    with ShortWrites(tmp_path / "blob") as file:
        assert write_parts(file, map(memoryview, parts)) == sum(map(len, parts))
        assert max(file.offered) <= 2**17
    assert (tmp_path / "blob").read_bytes() == b"".join(parts)
