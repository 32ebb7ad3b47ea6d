#!/usr/bin/env bash
# Is `pack-quantized` of compressed-tensors one layout in all versions?
#
# Expected: yes, for config.json names the format and the number of bits, and no version of the layout. Seen: integers of
# 3, 5, 6 and 7 bits have two. In 0.17.0 a word of 32 bits holds as many whole integers as fit (ten of 3 bits); in 0.20.1,
# and from 0.18.0 on, they follow one another without gaps, over the ends of words. 0.20.1 decompresses a module that
# 0.17.0 wrote, without an error or a warning, to other weights: 192 of 256 of 3 bits. Only the shape of weight_packed tells
# the layouts apart: 64 inputs of 3 bits take 7 words or 6. Integers of 2, 4 and 8 bits are the same in both.
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet transformers==5.19.0 loguru==0.7.3 pydantic==2.14.4 psutil==7.2.2
for version in 0.17.0 0.20.1; do
    "$folder/env/bin/pip" install --quiet --no-deps --target "$folder/$version" "compressed-tensors==$version"
done
cat > "$folder/packing.py" <<'PYTHON'
"""`packing.py write` compresses a module for each number of bits, `packing.py read` decompresses them."""

import sys

import compressed_tensors
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

INPUTS = 64
print("compressed-tensors", compressed_tensors.__version__)
errors = {}
for bits in (2, 3, 4, 5, 6, 7, 8):
    arguments = QuantizationArgs(num_bits=bits, symmetric=True, strategy="channel")
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    steps = torch.arange(4 * INPUTS).view(4, INPUTS) % 2**bits - 2 ** (bits - 1)  # the scale is 1
    weight = steps.float()
    if sys.argv[1] == "write":
        state = {"weight": weight, "weight_scale": torch.ones(4, 1)}
        state = PackedQuantizationCompressor.compress(state, scheme)
        torch.save(state, f"{bits}.pt")
        print(f"{bits} bits: {INPUTS} inputs take {state['weight_packed'].shape[1]} words")
    state = PackedQuantizationCompressor.decompress(torch.load(f"{bits}.pt"), scheme)
    num_wrong = int((state["weight"] != weight).sum())
    errors[bits] = num_wrong > 0
    print(f"{bits} bits: {num_wrong} of {weight.numel()} weights are not what was written")
if sys.argv[1] == "write":
    assert not any(errors.values())
else:
    assert [bits for bits, is_wrong in errors.items() if is_wrong] == [3, 5, 6, 7], "old files are read"
PYTHON
cd "$folder"
PYTHONPATH="$folder/0.17.0" "$folder/env/bin/python" packing.py write
PYTHONPATH="$folder/0.20.1" "$folder/env/bin/python" packing.py read
