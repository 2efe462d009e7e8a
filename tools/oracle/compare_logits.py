#!/usr/bin/env python3
"""Compare the engine's logits with reference ones.  Needs numpy and gguf.

    compare_logits.py mine.npy ref.npz [--tolerance 1e-4]
    compare_logits.py mine.npy golden.npy --first-row 32

mine.npy is what `ebbtide logits` writes; the reference is an npz of reference_logits.py or numpy_forward.py, or a stored npy whose first
row belongs to position --first-row.  Prints the largest difference, root mean square, share of positions with the same best token and
the worst divergence; exits 1 past --tolerance (largest difference), 2 where the shapes do not fit.
"""
import argparse
import sys

import numpy as np

from numpy_forward import compare


def load(path, key):
    data = np.load(path)
    if not isinstance(data, np.ndarray):
        if key not in data:
            sys.exit(f"{path} has no {key}: it has {', '.join(data.files)}")
        data = data[key]
    return data.astype(np.float32)


def main():
    ap = argparse.ArgumentParser(description="Compare logits with reference ones.")
    ap.add_argument("mine")
    ap.add_argument("reference")
    ap.add_argument("--key", default="logits", help="array of an npz; mtp_logits for the draft block")
    ap.add_argument("--first-row", type=int, default=0, help="position of the reference's first row")
    ap.add_argument("--tolerance", type=float, help="exit 1 past this largest difference")
    a = ap.parse_args()
    mine, reference = load(a.mine, a.key)[a.first_row:], load(a.reference, a.key)
    if mine.shape != reference.shape:
        print(f"{a.mine} from row {a.first_row} is {mine.shape}, {a.reference} is {reference.shape}", file=sys.stderr)
        sys.exit(2)
    if not np.isfinite(mine).all():
        print(f"{a.mine}: {np.count_nonzero(~np.isfinite(mine))} numbers are not finite", file=sys.stderr)
        sys.exit(1)
    largest = compare(a.mine, mine, reference)
    if a.tolerance is not None and largest > a.tolerance:
        print(f"past the tolerance of {a.tolerance:g}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
