"""Write the embedded draft as a GGUF file, so that llama.cpp can draft with it too.

    python scripts/embedded_gguf.py draft.gguf

The weights are those of the cache, in their own bits; tokenizer and settings are those of the embedded target's file.
"""

from __future__ import annotations

from pathlib import Path

import click
import gguf
import numpy

from pearl.models.checkpoints.checkpoint import resolve_checkpoint
from pearl.models.checkpoints.embedded import DRAFT_NUM_LAYERS
from pearl.models.checkpoints.gguf import Tensor, table_in

_FAMILY = "llama"
_COUNT = f"{_FAMILY}.block_count"
_OF_THE_FILE = ("GGUF.", "general.architecture")  # fields that a writer adds itself


def embedded_file() -> Path:
    """Return the GGUF file of the embedded target; the first call downloads it."""
    table = table_in(resolve_checkpoint("embedded"))
    assert table is not None
    return Path(table.file)


def write_draft(file: Path) -> None:
    """Write the embedded draft to `file`."""
    settings = gguf.GGUFReader(embedded_file())
    writer = gguf.GGUFWriter(file, _FAMILY)
    for field in settings.fields.values():
        if field.name.startswith(_OF_THE_FILE):
            continue
        value = field.contents()
        if field.name == _COUNT:
            value = DRAFT_NUM_LAYERS
        writer.add_key_value(field.name, value, field.types[0], field.types[-1])
    heads = {
        "q_proj": settings.fields[f"{_FAMILY}.attention.head_count"].contents(),
        "k_proj": settings.fields[f"{_FAMILY}.attention.head_count_kv"].contents(),
    }
    _add_weights(writer, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_weights(writer: gguf.GGUFWriter, heads: dict[str, int]) -> None:
    table = table_in(resolve_checkpoint("embedded-draft"))
    assert table is not None
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, DRAFT_NUM_LAYERS)
    weights = numpy.memmap(table.file, mode="r")
    for name, tensor in table.tensors.items():
        data = weights[tensor.offset : tensor.offset + tensor.size]
        if tensor.kind == "BF16":  # llama.cpp takes norms in float32 only
            rows = _as_float32(data)
            kind = gguf.GGMLQuantizationType.F32
        else:
            rows = _interleaved(data, tensor, heads.get(name.split(".")[-2], 0))
            kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor(str(names.get_name(name, (".weight",))), rows, raw_dtype=kind)


def _as_float32(data: numpy.ndarray) -> numpy.ndarray:
    return (data.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)


def _interleaved(data: numpy.ndarray, tensor: Tensor, heads: int) -> numpy.ndarray:
    """Return a matrix's rows of bytes; those of queries and keys in the order of llama.cpp's rope.

    transformers rotates number i of a head with number i + head_dim / 2, llama.cpp's family "llama" with its neighbour.
    """
    rows = data.reshape(tensor.shape[0], -1)
    if not heads:
        return rows
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return numpy.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def main(file: Path) -> None:
    """Write the embedded draft to FILE."""
    write_draft(file)
    click.echo(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
