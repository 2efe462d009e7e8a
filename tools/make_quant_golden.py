#!/usr/bin/env python3
"""Writes the golden blocks of tests/golden/quant: random blocks of every type and the f32 weights the `gguf` package gives.

Use: python3 tools/make_quant_golden.py OUT_FOLDER     (needs gguf==0.19.0 and numpy==2.4.6)
"""

import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from gguf.constants import GGML_QUANT_SIZES

# Byte offsets of the half-precision numbers in a block. IQ1_M and MXFP4 store their scale in another way.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0], "MXFP4": [],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "IQ1_S": [0], "IQ1_M": [], "IQ4_XS": [0],
}  # fmt: skip

# Ordinary scales, then zero, minus zero, the smallest and the largest subnormal, and the largest number.
SCALES = np.array([0.0123, -0.5, 1.75, 0.0, -0.0, 2.0**-24, -(2.0**-14 - 2.0**-24), 65504.0], dtype=np.float16)

FLOATS = {
    "F32": (np.uint32, [0x00000000, 0x80000000, 0x00000001, 0x007FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000]),
    "F16": (np.uint16, [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0x7C00, 0xFC00]),
    "BF16": (np.uint16, [0x0000, 0x8000, 0x0001, 0x807F, 0x7F7F, 0x7F80, 0xFF80]),
}


def float_bits(name, rng):
    dtype, edges = FLOATS[name]
    values = np.concatenate([np.array(edges, dtype=dtype), rng.integers(0, np.iinfo(dtype).max, 57, dtype=dtype)])
    # Not-a-number has many encodings and no one value: a set exponent gets a clear mantissa.
    exponent = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[name]
    sign_and_exponent = dtype(exponent | (1 << (8 * dtype().itemsize - 1)))
    values = np.where(values & dtype(exponent) == exponent, values & sign_and_exponent, values)
    return values.astype(dtype).view(np.uint8)


def quant_blocks(name, block_bytes, rng):
    blocks = rng.integers(0, 256, (len(SCALES), block_bytes), dtype=np.uint8)
    for index, scale in enumerate(SCALES):
        for place, offset in enumerate(HALVES[name]):
            # A second number (the min) takes another scale of the list, so that pairs of edges meet.
            half = SCALES[(index + 3 * place) % len(SCALES)]
            blocks[index, offset : offset + 2] = np.frombuffer(half.tobytes(), dtype=np.uint8)
        if name == "IQ1_M":
            bits = int(scale.view(np.uint16))
            for word in range(4):
                high = blocks[index, 49 + 2 * word]
                blocks[index, 49 + 2 * word] = (int(high) & 0x0F) | (((bits >> (4 * word)) & 15) << 4)
        if name == "MXFP4":
            blocks[index, 0] = [127, 120, 133, 0, 1, 2, 254, 255][index]
    return blocks.reshape(-1)


def main():
    out = Path(sys.argv[1])
    rng = np.random.default_rng(20250711)
    for name in list(FLOATS) + list(HALVES):
        quant_type = GGMLQuantizationType[name]
        data = float_bits(name, rng) if name in FLOATS else quant_blocks(name, GGML_QUANT_SIZES[quant_type][1], rng)
        weights = np.asarray(dequantize(data, quant_type), dtype=np.float32)
        assert not np.isnan(weights).any(), name
        (out / f"{name}.blocks").write_bytes(data.tobytes())
        (out / f"{name}.weights").write_bytes(weights.astype("<f4").tobytes())


if __name__ == "__main__":
    main()
