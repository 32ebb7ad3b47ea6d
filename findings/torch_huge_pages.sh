#!/usr/bin/env bash
# Does a large tensor of torch 2.13.0 on a CPU lie in huge pages, where Linux's setting is `madvise`?
#
# Expected: tensors and arrays of numpy are alike, the kernel decides. Seen: numpy 2.3.4 asks for huge pages for arrays of
# 4 MiB and more, torch does not for any tensor, so all its weights lie in pages of 4 KiB. Reading those took 1.45 times as
# long on one core of a virtual machine (115 MiB, Xeon). With THP_MEM_ALLOC_ENABLE=1, which is read once, at the first
# allocation, torch asks too, but only for tensors of 2 MiB and more: the matrices of a small model are smaller.
#
# The share of the memory that is in huge pages is printed, once new and once after all of it was written.
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
