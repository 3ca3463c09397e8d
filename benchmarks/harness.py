"""Options, plots and models by name, which the scripts share beyond `ragcache bench`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer
from shapes import shaped_model
from sqlalchemy import create_engine

from ragcache.bench.harness import (
    SHAPES,
    LlamaShape,
    Progress,
    PromptSetting,
    dtypes_of,
    made_up_key,
    seconds,
    shaped_causal,
)
from ragcache.db.database import database_url
from ragcache.machine import describe_machine
from ragcache_api.cli.console import plain_table
from ragcache_api.cli.measure import (
    BenchDTypeOption,
    JsonFile,
    output_file,
    print_figures,
    run_benchmark,
)

__all__ = [
    "ALL_SHAPES", "SHAPES", "BenchDTypeOption", "DeviceOption", "JsonFile", "LlamaShape",
    "PlotFile", "Progress", "PromptSetting", "describe_machine", "dtypes_of", "empty_schema",
    "made_up_key", "named_shapes", "new_figure", "plain_table", "print_figures", "run_benchmark",
    "seconds", "shaped_causal", "shaped_model",
]  # fmt: skip

ALL_SHAPES = {
    "tiny": LlamaShape(2, 256, 4, 2, 512, 16_384, 131_072, 5e5),
    "0.5b": LlamaShape(24, 896, 14, 2, 4864, 151_936, 32_768, 1e6, tied=True),
    "1.5b": LlamaShape(28, 1536, 12, 2, 8960, 151_936, 32_768, 1e6, tied=True),
    **SHAPES,
}
"""Shapes: one for shares, which need no large model, two of small instruct models, two for GPUs."""

PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", callback=output_file,
                 help="Draw a plot: .png, .svg or .pdf."),
]  # fmt: skip
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]


def named_shapes(names: str) -> dict[str, LlamaShape]:
    """Shapes by their names, with commas between. Raises `BadParameter` for one that is none."""
    try:
        return {name: ALL_SHAPES[name] for name in names.split(",")}
    except KeyError as error:
        raise typer.BadParameter(
            f"there is no shape {error}; give {' or '.join(ALL_SHAPES)}"
        ) from error


def new_figure(columns: int) -> Any:
    """A matplotlib figure and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * columns, 4), layout="constrained", dpi=150)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


@contextmanager
def empty_schema(ledger: str) -> Iterator[str]:
    """Make a schema in a PostgreSQL database, yield its URL, and drop the schema at the end."""
    name = f"ragcache_bench_{uuid4().hex}"
    engine = create_engine(database_url(ledger))
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    try:
        yield f"{ledger}{'&' if '?' in ledger else '?'}options=-csearch_path%3D{name}"
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")
        engine.dispose()
