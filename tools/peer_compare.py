#!/usr/bin/env python3
"""Time the host backend against llama.cpp on the same CPU and threads, taking turns, and print a table.  Needs numpy and libllama.

    .oracle/venv/bin/python tools/peer_compare.py --repeat 5 > table.md
    .oracle/venv/bin/python tools/peer_compare.py --only bard,small-q4_k --prompt 256 --generate 32

Every repetition is a fresh process of each engine on the same random prompt, llama.cpp first and the engine first by turns; a ratio is taken
within a repetition, so that a machine that slows down for a while slows both.  Synthetic models are made once, in --models.

The machine must be idle.  llama.cpp's threads spin at a barrier after every operation, so with as many threads as CPUs another busy program
makes it slower by a factor of up to hundreds, and a ratio measured so says nothing.  The load before the start is part of the output.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ORACLE = os.path.join(HERE, "oracle")
sys.path.insert(0, ORACLE)
import peer_bench  # noqa: E402

ROOT = os.path.dirname(HERE)
BARD = os.path.join(ROOT, "assets/bard-qwen3moe-9m-IQ4_NL.gguf")
LAYERS_OF_30B = "--shape qwen3-30b-a3b --layers 4 --vocab 4096"
# name: arguments of make_tiny_model.py, or None for a file that is there
MODELS = {
    "bard": None,
    "small-q4_k": "--shape small --type Q4_K",
    "small-iq3_xxs": "--shape small --type IQ3_XXS --head-type Q5_K",
    "small-q8_0": "--shape small --type Q8_0",
    "30b-4-layers-q4_k": f"{LAYERS_OF_30B} --type Q4_K",
    "30b-4-layers-iq3_xxs": f"{LAYERS_OF_30B} --type IQ3_XXS --head-type Q5_K",
}
N_VOCAB_MIN = 512
FIGURES = {"read": "prefill_tokens_per_s", "write": "decode_tokens_per_s"}


class Failed(Exception):
    """An engine did not give the figures asked for."""


def model_file(name, folder):
    if MODELS[name] is None:
        return BARD
    path = os.path.join(folder, f"{name}.gguf")
    if not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        part = f"{path}.{os.getpid()}.part"
        subprocess.run([sys.executable, os.path.join(ORACLE, "make_tiny_model.py"), *MODELS[name].split(), "--out", part],
                       check=True, stdout=sys.stderr)
        os.replace(part, path)
    return path


def call(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(command)} exited {done.returncode}: {done.stderr.strip()[-500:]}")
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError as error:
        raise Failed(f"{' '.join(command)} did not print one JSON object: {error}") from error


def run_peer(path, a):
    """Figures of llama.cpp; peer_bench.py draws the prompt that prompt_file() writes."""
    command = [sys.executable, os.path.join(ORACLE, "peer_bench.py"), path, "--json", "--repeat", "1", "--threads", str(a.threads),
               "--prompt", str(a.prompt), "--generate", str(a.generate), "--below", str(N_VOCAB_MIN)]
    if a.flash:
        command.append("--flash")
    answer = call(command)
    return answer["runs"][0], answer["version"]


def ebbtide_figures(answer, a):
    """The two speeds of `ebbtide run --json`, after a look at whether it did the work asked for."""
    missing = [key for key in (*FIGURES.values(), "prompt_tokens", "tokens") if key not in answer]
    if missing:
        raise Failed(f"ebbtide's answer has no {', '.join(missing)}")
    if answer["prompt_tokens"] != a.prompt or len(answer["tokens"]) != a.generate:
        raise Failed(f"ebbtide read {answer['prompt_tokens']} and wrote {len(answer['tokens'])} tokens, not {a.prompt} and {a.generate}")
    return {key: float(answer[key]) for key in FIGURES.values()}


def run_ebbtide(path, prompt, a):
    vram_mib = a.vram_mib or max(8192, 2 * (os.path.getsize(path) >> 20) + 2048)
    return ebbtide_figures(call([a.ebbtide, "run", "-m", path, "--tokens", f"@{prompt}", "-n", str(a.generate), "--temp", "0", "--ignore-eos",
                                 "--threads", str(a.threads), "--vram-mib", str(vram_mib), "--json", *a.ebbtide_flag]), a)


def prompt_file(folder, count):
    path = os.path.join(folder, "prompt.txt")
    with open(path, "w") as f:
        f.write(",".join(map(str, peer_bench.prompt_tokens(N_VOCAB_MIN, count))))
    return path


def spread(values, digits=1):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def cpu_name():
    try:
        with open("/proc/cpuinfo") as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), platform.processor())
    except OSError:
        return platform.processor()


def busy_cpus(threads):
    """The load average before the start; warns where other programs leave too few CPUs."""
    load = os.getloadavg()[0]
    if load + threads > os.cpu_count() + 0.3:
        print(f"peer_compare: load {load:.1f} and {threads} threads on {os.cpu_count()} CPUs: llama.cpp will be far too slow and the ratios too good;"
              " wait until the machine is idle, or use fewer --threads", file=sys.stderr)
    return load


def measure(name, prompt, a):
    """Figures of one model: a list of runs for each engine, and llama.cpp's version."""
    path, peer, ours, version = model_file(name, a.models), [], [], ""
    for turn in range(a.repeat):
        if not a.peer_only and turn % 2:
            ours.append(run_ebbtide(path, prompt, a))
        figures, version = run_peer(path, a)
        peer.append(figures)
        if not a.peer_only and turn % 2 == 0:
            ours.append(run_ebbtide(path, prompt, a))
        print(f"{name}, repetition {turn + 1} of {a.repeat}", file=sys.stderr)
    return os.path.getsize(path) / 2 ** 20, peer, ours, version


def table_rows(name, mib, peer, ours):
    for label, key in FIGURES.items():
        row = [name, f"{mib:,.0f}", label, spread([run[key] for run in peer])]
        if ours:
            row += [spread([run[key] for run in ours]), spread([mine[key] / other[key] for mine, other in zip(ours, peer)], 2)]
        yield "| " + " | ".join(row) + " |"


def main():
    ap = argparse.ArgumentParser(description="Time the host backend against llama.cpp on the same CPU.")
    ap.add_argument("--ebbtide", default=os.path.join(ROOT, "target/release/ebbtide"))
    ap.add_argument("--ebbtide-flag", action="append", default=[], help="a further flag of ebbtide run, as --ebbtide-flag=--kv=f16; may be repeated")
    ap.add_argument("--models", default=os.path.join(ROOT, ".oracle/models"), help="folder of the synthetic models")
    ap.add_argument("--only", help="names with commas, of: " + ", ".join(MODELS))
    ap.add_argument("--prompt", type=int, default=512)
    ap.add_argument("--generate", type=int, default=64)
    ap.add_argument("--repeat", type=int, default=3)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--vram-mib", type=int, help="size of the simulated device; default: room for all experts")
    ap.add_argument("--flash", action="store_true", help="llama.cpp with its flash-attention kernel")
    ap.add_argument("--peer-only", action="store_true", help="time llama.cpp alone")
    a = ap.parse_args()
    names = a.only.split(",") if a.only else list(MODELS)
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        ap.error(f"no model {', '.join(unknown)}: one of {', '.join(MODELS)}")
    if not a.peer_only and not os.path.exists(a.ebbtide):
        ap.error(f"{a.ebbtide} is missing: cargo build --release, or --peer-only")
    if min(a.prompt, a.generate, a.repeat, a.threads) < 1:
        ap.error("--prompt, --generate, --repeat and --threads are at least 1")

    rows, version, load = [], "", busy_cpus(a.threads)
    with tempfile.TemporaryDirectory() as folder:
        prompt = prompt_file(folder, a.prompt)
        try:
            for name in names:
                mib, peer, ours, version = measure(name, prompt, a)
                rows += table_rows(name, mib, peer, ours)
        except Failed as error:
            sys.exit(f"peer_compare: {error}")
    print(f"{cpu_name()}, {os.cpu_count()} CPUs visible, load {load:.1f} before the start, {platform.system()} {platform.release()}; {a.threads} threads; llama.cpp 0.5.0 ({version}), "
          f"CPU, f16 KV, flash attention {'on' if a.flash else 'off'}, ubatch 512; prompt of {a.prompt} random tokens, {a.generate} written greedily; "
          f"{a.repeat} repetitions, fresh process each, taking turns. Tokens a second: median (least–most)"
          + ("." if a.peer_only else "; ratio within a repetition.") + "\n")
    head = ["model", "MiB", "", "llama.cpp"] + ([] if a.peer_only else ["ebbtide", "ebbtide / llama.cpp"])
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    print("\n".join(rows))


if __name__ == "__main__":
    main()
