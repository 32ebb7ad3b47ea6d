#!/bin/sh
# Triton's interpreter casts float32 to bfloat16 by dropping the lower 16 bits, even where the program asks for the
# nearest number (fp_downcast_rounding="rtne"). A GPU and torch round to the nearest; so does the interpreter's float16.
# Seen with triton 3.9.0, torch 2.13.0 and numpy 2.3.5 on a CPU:
#
#   float32     plain       rtne        torch       (as bfloat16)
#   0.1         0.09960938  0.09960938  0.10009766
#   1.9999999   1.9921875   1.9921875   2.0
#
# So a kernel whose rounding is right on a GPU differs from torch in the interpreter, always towards zero.
#
# Exits with 1 if this changes.
set -eu

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet triton==3.9.0 numpy==2.3.5

cat > "$folder/casts.py" <<'END'
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def cast(x, plain, nearest, half, n: tl.constexpr):
    at = tl.arange(0, n)
    numbers = tl.load(x + at)
    tl.store(plain + at, numbers.to(tl.bfloat16))
    tl.store(nearest + at, numbers.to(tl.bfloat16, fp_downcast_rounding="rtne"))
    tl.store(half + at, numbers.to(tl.float16))


x = torch.tensor([0.1, 1.9999999])
plain, nearest = torch.zeros(2, 2, dtype=torch.bfloat16)
half = torch.zeros(2, dtype=torch.float16)
cast[(1,)](x, plain, nearest, half, 2)
print("triton", triton.__version__, "torch", torch.__version__)
for row in zip(x.tolist(), plain.tolist(), nearest.tolist(), x.bfloat16().tolist()):
    print(*(f"{number:.8g}" for number in row))
dropped = (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
same = torch.equal(plain, dropped) and torch.equal(nearest, dropped) and torch.equal(half, x.half())
sys.exit(0 if same and not torch.equal(dropped, x.bfloat16()) else 1)
END
TRITON_INTERPRET=1 "$folder/env/bin/python" "$folder/casts.py"
