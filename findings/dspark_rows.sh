#!/bin/sh
# SpecForge trains the rows of a DSpark block for other positions than its own decoding takes them for. Seen with
# specforge 0.2.0 (torch 2.13.0, transformers 5.19.0), for a block of 4 rows whose first one, the anchor, is at position 10:
#
#   trained: rows [0, 1, 2, 3] give the tokens at [11, 12, 13, 14]
#   decoded: the tokens at [11, 12, 13] are drawn from rows [1, 2, 3]
#
# So `spec_generate` draws each token from the row that was trained for the token after it. An engine must take the rows
# as they were trained: row 0 is the first that guesses, as in speculators' DSpark (`sample_from_anchor` true). DFlash
# heads of SpecForge are trained as they are decoded; the config.json of neither says which it is.
#
# Exits with 1 if this changes.
set -eu

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet transformers==5.19.0 datasets==5.1.0 accelerate==1.15.0 pydantic==2.14.4
"$folder/env/bin/pip" install --quiet --no-deps specforge==0.2.0

cat > "$folder/rows.py" <<'END'
import sys
from types import SimpleNamespace

import torch
from specforge.algorithms.common.dflash_family_model import OnlineDSparkModel
from specforge.modeling.draft.dspark import DSparkDraftModel

ANCHOR = 10
BLOCK = 4
ids = torch.arange(100, 130)[None]  # the token at position p is 100 + p
trainer = SimpleNamespace(block_size=BLOCK)
labels, _, _ = OnlineDSparkModel._build_dspark_labels_and_mask(
    trainer, ids, torch.ones(ids.shape), torch.tensor([[ANCHOR]]), torch.tensor([[True]])
)
trained = (labels[0, 0] - 100).tolist()
print("trained: rows", list(range(BLOCK)), "give the tokens at", trained)

rows = []


def lm_head(states):
    rows.extend(int(row) for row in states.flatten())
    return torch.zeros(*states.shape[:2], 7)


draft = SimpleNamespace(block_size=BLOCK, markov_head=None)
hidden = torch.arange(BLOCK, dtype=torch.float32).view(1, BLOCK, 1)  # row k holds k
DSparkDraftModel._sample_draft_tokens(draft, SimpleNamespace(lm_head=lm_head), hidden, None)
decoded = list(range(ANCHOR + 1, ANCHOR + BLOCK))
print("decoded: the tokens at", decoded, "are drawn from rows", rows)
sys.exit(0 if trained == [11, 12, 13, 14] and rows == [1, 2, 3] else 1)
END
cd "$folder"
"$folder/env/bin/python" "$folder/rows.py" 2> /dev/null
