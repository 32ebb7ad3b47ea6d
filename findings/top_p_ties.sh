#!/bin/sh
# transformers 5.24.0 with torch 2.13.0 (CPU): which of equally likely tokens top-p keeps depends on the number of tokens.
# TopPLogitsWarper sorts without stable=True.  Of 16 equal tokens and top_p 0.5 it keeps the 8 with the highest ids, of 49,152
# those with the lowest, of 17 the ids 0 to 7 and 9.  Where equal and unequal scores are mixed it is neither.  TopKLogitsWarper keeps all
# tokens that equal the k-th.
# Exits with 1 if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet transformers==5.24.0
"$folder/env/bin/python" - <<'PYTHON'
import sys

import torch
import transformers
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

seen = {}
for size in (16, 17, 49152):
    equal = torch.zeros(1, size)
    kept = (TopPLogitsWarper(0.5)(None, equal)[0] > -torch.inf).nonzero().flatten().tolist()
    mixed = torch.randint(0, 4, (1, size), generator=torch.Generator().manual_seed(0)).float()
    of_mixed = TopPLogitsWarper(0.5)(None, mixed)[0] > -torch.inf
    edge = of_mixed[mixed[0] == mixed[0][of_mixed].min()].int().tolist()
    ends = {(0, len(kept) - 1): "lowest ids", (size - len(kept), size - 1): "highest ids"}.get((kept[0], kept[-1]), "others")
    seen[size] = (len(kept), ends, "highest ids" if edge == sorted(edge) else "no order")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {size} tokens: keeps", *seen[size])
    assert int((TopKLogitsWarper(2)(None, equal) > -torch.inf).sum()) == size

expected = {
    16: (8, "highest ids", "highest ids"),
    17: (9, "others", "no order"),
    49152: (24576, "lowest ids", "no order"),
}
sys.exit(seen != expected)
PYTHON
