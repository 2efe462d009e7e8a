#!/usr/bin/env python3
"""Record size and CRC-32 of synthetic models, for the test of the Rust generator.  Needs numpy only.

    record_synthetic.py > ../../tests/golden/synthetic.tsv

The argument sets cover both architectures that the tests write, every shape below the published ones, every block type, the
overrides, draft blocks and skewed routing.
"""
import os
import subprocess
import sys
import tempfile
import zlib

ARGS = """
--shape micro --type F32
--shape micro --seed 2 --type Q4_K
--shape micro --seed 3 --type IQ3_XXS --head-type Q5_K
--shape tiny
--shape micro --type BF16 --expert-type Q6_K --down-type Q3_K --tied --skew 1.2
--shape small --layers 1 --experts 16 --used 2 --type IQ4_XS --embd-type IQ2_S
--shape micro --vocab 1000 --type F16 --gate-type IQ1_S --up-type IQ2_XXS --down-type Q2_K --skew 0.6
--shape micro --seed 4294967295 --type Q4_1 --dense-type Q5_1 --head-type Q5_0 --embd-type Q4_0
--shape tiny --layers 3 --vocab 300 --type IQ2_XS --down-type IQ3_S --dense-type IQ4_NL
--arch qwen35moe --shape micro --type F32 --mtp 1
--arch qwen35moe --shape micro --seed 2 --type IQ4_NL --mtp 1
--arch qwen35moe --shape micro --seed 3 --type IQ3_XXS --head-type Q5_K --mtp 1 --skew 1.0
--arch qwen35moe --seed 4 --shared-type Q4_K --dense-type BF16 --tied --mtp 0
--arch qwen35moe --shape small --layers 3 --experts 16 --used 2 --vocab 1000 --type Q4_K --down-type Q6_K --mtp 1
""".strip().splitlines()


def main():
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "make_tiny_model.py")
    print("# arguments of make_tiny_model.py, bytes of the file, its CRC-32; written by tools/oracle/record_synthetic.py")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.gguf")
        for args in ARGS:
            subprocess.run([sys.executable, script, *args.split(), "--out", path], check=True, stdout=subprocess.DEVNULL)
            data = open(path, "rb").read()
            print(f"{args}\t{len(data)}\t{zlib.crc32(data):08x}")


if __name__ == "__main__":
    main()
