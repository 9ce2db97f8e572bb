"""A GGUF file's numbers back into the model that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy
import torch

from llmtop.trainer.quantize.plan import Planned, plan_gguf
from llmtop.trainer.quantize.source import Source
from llmtop.trainer.worker.packing.reading import PIECE_BYTES, in_halves


@torch.no_grad()
def load_gguf(model: Any, source: Source, kind: str, made: Path) -> None:
    """Every parameter that the file has, piece by piece; the file is mapped, not read whole."""
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(made).tensors}
    for planned in plan_gguf(source, kind).planned:
        if planned.tensor is not None:
            _fill(model.get_parameter(planned.tensor.key), planned, written[planned.name])


def _fill(parameter: torch.nn.Parameter, planned: Planned, written: Any) -> None:
    rows = planned.shape[0]
    data = written.data.reshape(rows, -1) if len(planned.shape) > 1 else written.data.reshape(1, -1)
    places = parameter.data.reshape(len(data), -1)
    unit = rows // planned.heads if planned.heads else 1
    if len(planned.shape) == 1 and planned.heads:
        # A bias is one row here, and its numbers change places as the rows of its matrix do.
        data, places = data.reshape(rows, 1), parameter.data.reshape(rows, 1)
    at_a_time = max(1, PIECE_BYTES // (4 * places.shape[1] * unit)) * unit
    for first in range(0, len(data), at_a_time):
        piece = gguf.dequantize(data[first : first + at_a_time], written.tensor_type)
        piece = piece.reshape(-1, places.shape[1])
        if planned.heads:
            piece = in_halves(piece, unit)
        if planned.plus_one:
            piece = piece - numpy.float32(1)
        # Of some types it is the file's own page, which nobody may write to.
        places[first : first + len(piece)] = torch.from_numpy(numpy.array(piece)).to(places.dtype)
