#!/bin/sh
# Two trainers of DFlash heads mean different positions by one `sliding_window`. Seen with speculators 0.9.0 and specforge
# 0.2.0 (torch 2.13.0, transformers 5.19.0): positions that the rows of a block of 5 see of the text before position 10,
# where the block begins, if the window is 4:
#
#   speculators  [6, 7, 8, 9] [6, 7, 8, 9] [6, 7, 8, 9] [6, 7, 8, 9] [6, 7, 8, 9]
#   specforge    [7, 8, 9] [8, 9] [9] [] []
#
# In speculators all rows see the window before the block. In SpecForge the window moves with the row and counts it. Both
# write layer_types and sliding_window into config.json, and nothing says which of the two is meant.
#
# Exits with 1 if this changes.
set -eu

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet transformers==5.19.0 datasets==5.1.0 accelerate==1.15.0 pydantic==2.14.4 \
    pydantic-settings==2.16.3 loguru==0.7.3 openai==3.57.0
"$folder/env/bin/pip" install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0

cat > "$folder/windows.py" <<'END'
import sys

import torch
from specforge.algorithms.common.dflash_family_model import create_dflash_sdpa_mask
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from torch.nn.attention.flex_attention import create_mask

ANCHOR = 10
BLOCK = 5
LENGTH = 20
WINDOW = 4
mask_of, queries, keys = create_anchor_block_mask_mod(
    document_ids=torch.zeros(LENGTH, dtype=torch.long),
    total_seq_len=LENGTH,
    anchor_positions=torch.tensor([ANCHOR]),
    block_size=BLOCK,
    sliding_window=WINDOW,
)
speculators = create_mask(mask_of, None, None, queries, keys, "cpu")[0, 0]
specforge = create_dflash_sdpa_mask(
    torch.tensor([[ANCHOR]]),
    torch.tensor([[True]]),
    LENGTH,
    BLOCK,
    torch.device("cpu"),
    sliding_window=WINDOW,
)[0, 0]
seen = []
for name, mask in (("speculators", speculators), ("specforge", specforge)):
    rows = [row[:LENGTH].nonzero().flatten().tolist() for row in mask.bool()]
    print(f"{name:12}", *rows)
    seen.append(rows)
expected = [[[6, 7, 8, 9]] * BLOCK, [[7, 8, 9], [8, 9], [9], [], []]]
sys.exit(0 if seen == expected else 1)
END
cd "$folder"
"$folder/env/bin/python" "$folder/windows.py" 2> /dev/null
