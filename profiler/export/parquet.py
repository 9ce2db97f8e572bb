"""A table of metrics as Parquet, from its CSV, part by part. Needs pyarrow."""

from __future__ import annotations

from pathlib import Path

from llmtop.profiler.export.tables import Table


def write_parquet(table: Table, source: Path, target: Path) -> bool:
    """Columns have the table's types, what is empty is null. Whether there was any row."""
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    types = {name: pyarrow.type_for_alias(kind) for name, kind in table.kinds().items()}
    options = pyarrow.csv.ConvertOptions(
        column_types=types, null_values=[""], true_values=["true"], false_values=["false"]
    )
    schema = pyarrow.schema(list(types.items()))
    rows = 0
    with (
        pyarrow.csv.open_csv(source, convert_options=options) as reader,
        pyarrow.parquet.ParquetWriter(target, schema, compression="zstd") as writer,
    ):
        for batch in reader:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows > 0
