#!/usr/bin/env bash
# Does a large tensor of torch 2.13.0 on a CPU lie in huge pages, where Linux's setting is `madvise`?
#
# Expected: yes, as an array of numpy does, because the kernel decides. Seen: an array of numpy 2.3.4 does, a tensor of torch
# does not. With THP_MEM_ALLOC_ENABLE=1 it does, but 256 tensors of 1 MiB, as large as the matrices of a small model, still do
# not. It matters where weights are read again and again: a loop in C read 115 MiB of a virtual machine (Xeon, one core) at
# 9.8 GB/s in pages of 4 KiB, and at 14.3 in huge ones.
#
# What is printed are the shares of 256 MiB that lie in huge pages.
# On Linux whose /sys/kernel/mm/transparent_hugepage/enabled is `madvise`; some minutes, 800 MB.
set -euo pipefail
if ! grep -qF '[madvise]' /sys/kernel/mm/transparent_hugepage/enabled; then
    echo "the kernel's setting is not madvise: nothing to see here" >&2
    exit 2
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${FINDING_PYTHON:-$folder/env/bin/python}
if [ -z "${FINDING_PYTHON:-}" ]; then
    python3 -m venv "$folder/env"
    "$folder/env/bin/pip" install --quiet torch==2.13.0
    "$folder/env/bin/pip" install --quiet numpy==2.3.4
fi
cat > "$folder/show.py" <<'PYTHON'
import sys

import numpy
import torch


def huge_share(address, size):
    """Return the share of memory in huge pages, of the mapping that holds an address."""
    is_inside = False
    for line in open("/proc/self/smaps"):
        words = line.split()
        bounds = words[0].split("-")
        if len(bounds) == 2:
            is_inside = int(bounds[0], 16) <= address < int(bounds[1], 16)
        elif is_inside and words[0] == "AnonHugePages:":
            return int(words[1]) * 1024 / size
    raise AssertionError("the address is in no mapping")


size = 256 << 20
array = numpy.ones(size, dtype=numpy.uint8)
tensor = torch.ones(size, dtype=torch.uint8)
small = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(256)]
shares = {
    "numpy": huge_share(array.ctypes.data + size // 2, size),
    "torch": huge_share(tensor.data_ptr() + size // 2, size),
    "torch, tensors of 1 MiB": max(huge_share(t.data_ptr() + t.nbytes // 2, size) for t in small),
}
for name, share in shares.items():
    print(f"{name}: {share:.2f} in huge pages")
wanted = {"numpy": True, "torch": sys.argv[1] == "asks", "torch, tensors of 1 MiB": False}
for name, is_huge in wanted.items():
    assert (shares[name] > 0.9) == is_huge, f"{name} has changed"
PYTHON
echo "torch as it is:"
"$python" "$folder/show.py" asks-not
echo "with THP_MEM_ALLOC_ENABLE=1:"
THP_MEM_ALLOC_ENABLE=1 "$python" "$folder/show.py" asks
