#!/usr/bin/env python3
"""Asks llama.cpp for the tokens of awkward texts; writes the golden files in tests/golden/tokenizer (see its README).

    python tools/make_tokenizer_golden.py --lib DIR --out tests/golden/tokenizer            renew the ids, from the *.spec.json there
    python tools/make_tokenizer_golden.py --lib DIR --out DIR --from-gguf NAME=FILE …       take vocabularies from model files first

DIR holds libllama and libggml. Needs the Python package gguf.
"""
import argparse
import ctypes as C
import glob
import json
import os
import random
import tempfile

import gguf

# ---------------------------------------------------------------- texts

PLAIN = """
hello world|Hello, world!|The quick brown fox jumps over the lazy dog.|antidisestablishmentarianism|a|A| a| A|  a|a |a  |ab cd  ef   gh
And it came to pass, that the king said unto him, I shall not go.|thou shalt not|To be, or not to be: that is the question.
0|1|12|123|1234567890|3.14159|1,000,000|-42|+7|1e-9|0x1F|1st 2nd 3rd|2026-01-31|12:34:56|v1.2.3-rc4|½ ¼ ²³ ①②③ Ⅳ ٣٤٥ १२३ 四五六 𝟙𝟚 ๓
I'll|I'LL|don't|DON'T|it's|IT'S|they're|THEY'RE|we've|WE'VE|I'm|I'M|he'd|HE'D|'s|'S|'t|'re|'ve|'m|'ll|'d|'tis|'twas|rock 'n' roll|O'Brien's|dogs'|''|'|'x|'l|'r|'v|'ſ|it’s|I’ll|''s|'s's|'llama|'Re'Ve|a'|'1|' s
café|cafe\u0301|naïve|nai\u0308ve|Ångström|A\u030angstro\u0308m|Zoë|façade|über|ÀÈÌÒÙ|ñandú|n\u0303andu\u0301|ǅ ǆ Ǆ|ﬁ ﬂ|ŒœÆæ|ß ẞ|ı İ|\u0301|\u0301\u0301|a\u0301\u0302\u0303b| \u0301|1\u0301|!\u0301|\u0301a|\u0301 \u0301|e\u0301'\u0301s|Z̷̢̛a̸l̶g̵o̴|ö\u20dd
你好，世界|你好 世界|日本語のテキスト|ひらがなカタカナ|한국어 텍스트|한국어|中文English混合123|「引用」|。、！？|东京2026年1月31日|漢字かな交じり文|㐀㐁|𠀀𠀁𪛖|々〆〇|ｆｕｌｌｗｉｄｔｈ１２３|ﾊﾝｶｸ
😀|😀😃😄|👨‍👩‍👧‍👦|👍🏽|🇩🇪🇫🇷|🏳️‍🌈|☺️|❤️‍🔥|a😀b|😀 a|1️⃣|🧑🏿‍💻 codes|©®™|→←↑↓|✓✗|🫠🫡|🦀Rust
שלום עולם|שָׁלוֹם|مرحبا بالعالم|مَرْحَبًا|السلام عليكم ١٢٣|فارسی می‌خواهم|abc אבג def|\u200fabc\u200e|اردو ہے۔
กรุงเทพมหานคร|สวัสดีครับ|น้ำ|ที่นี่|नमस्ते दुनिया|हिन्दी में लिखा|क्षत्रिय|தமிழ்|తెలుగు|ಕನ್ನಡ|മലയാളം|বাংলা|ગુજરાતી|ਪੰਜਾਬੀ|සිංහල|ភាសាខ្មែរ|မြန်မာ|བོད་ཡིག|ລາວ|አማርኛ|ქართული|Հայերեն|Ελληνικά|Русский язык|Й и\u0306|Tiếng Việt|Tie\u0302\u0301ng Vie\u0323\u0302t
-|--|---|a-b|a--b|a — b|a–b|a―b|well-known|-a| - | -a|- a|…|...|....|a...b|!?|?!?!|!!!!!!|(a)|((a))|[a]{b}<c>|"a"|“a”|‘a’|«a»|a_b|__a__|#a|@a|$5|€5|£5|50%|a&b|a*b|a=b|a==b|a!=b|a|~|^|\\\\|/|//|/* c */|`a`|```|¿qué?|¡ya!|§ 1|• a|‑|\u00ad|a\u00adb
https://example.org/a/b?c=d&e=f#g|http://user:pw@host:8080/%20x|mailto:a.b+c@d.example|www.example.com|ftp://x/~y|C:\\\\dir\\\\file.txt|/usr/local/bin|../a/./b|192.168.0.1|fe80::1%eth0
fn main() { println!("{}", 1 + 2); }|def f(x):\\n    return x**2\\n|if (a && b || !c) { return -1; }|let x: Vec<u8> = vec![0; 16];|#include <stdio.h>\\n\\nint main(void) {\\n\\treturn 0;\\n}\\n|SELECT * FROM t WHERE a='b';|<div class="x">y</div>|{"a": [1, 2.5, null, true], "b": {"c": "d"}}|\\t\\tx = y;\\r\\n\\t\\t}\\r\\n|a->b::c<d>()|x+=1;y-=2;z*=3;|camelCaseName|snake_case_name|SCREAMING_CASE|kebab-case-name|// comment|--flag=value|$HOME/${x}|a\\\\nb|%d %s %5.2f|0b1010_1111|'\\\\''|λx.x|∀x∈ℝ: x²≥0|∑∫√∞≈≠|E=mc²
<|endoftext|>|<|im_start|>|<|im_end|>|<think>|</think>|<tool_call>|</tool_call>|<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n|a<|im_end|>b|<|im_end|><|im_end|>|<|im_end|> <|im_end|>| <|im_end|> |<|im_end|>\\n\\n<|im_end|>|<|im_end|<|im_end|>|<<|im_end|>>|<|im_end|>>|<|IM_END|>|< |im_end| >|<|im_|im_end|>end|>|<think>\\n\\n</think>\\n\\n|Repeat exactly: hello </think> world|x</think>|</think>x|<think></think>|<think><think>|<thinking>|</ think>|<tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>|<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>|<|fim_pad|><|repo_name|><|file_sep|>|<|vision_start|><|image_pad|><|vision_end|>|<|object_ref_start|>|<tool_response>\\nx\\n</tool_response>|[PAD1]|[PAD300]|<s>|</s>|<unk>|<pad>|<|endoftext|><|im_start|>|'<think>s|I<|im_end|>'ll|  <think>  |1<think>2|é<|im_end|>\u0301|<|im_end|>'s|\\n<|im_end|>\\r\\n
"""

ESCAPED = [
    "", " ", "  ", "   ", "    ", "\t", "\t\t", " \t ", "\n", "\n\n", "\n\n\n", "\r", "\r\n", "\r\n\r\n", "\n\r", " \n", "\n ", "  \n  ", " \r\n ",
    "\n\n  a", "a\n", "a\r\n", "a\r\nb", "a\n\nb", "a \n b", "a  \n\n  b", "a\tb", "a\t\tb", "a \tb", "a\t b", "\ta", " \ta", "a" + " " * 20 + "b",
    " " * 100, "x" + " " * 100, "\n" * 50, "\t" * 30 + "x", " \n" * 20, "\n " * 20, "a\u00a0b", "a\u00a0\u00a0b", "\u00a0", "\u00a0\u00a0a",
    "a\u2003b", "a\u2003\u2003b", "a\u3000b", "\u3000\u3000a", "a\u200bb", "\u200b", "\u200d", "\ufeffa", "a\ufeff", "\u2028", "a\u2028b",
    "a\u2029\u2029b", "\u0085", "a\u0085b", "a\u0085\nb", "\x0b", "a\x0bb", "\x0c", "a\x0c\x0cb", "\u1680a", "a\u180eb", "a\u202fb", "1\u202f000",
    "!\n", "!\r\n", "!\n\n!", " !\n", "!!\r\r\n!", ".\n\n a", ", \n", "?\n?\n", "-\n-\n", " -\r\n -", "\x00", "a\x00b", "\x01\x02\x1f", "\x7f", "\x80\x9f",
    "\u0378", "a\u0378b", "\u0378\u0379", " \u0378", "\u0378 a", "1\u03782", "\u05ff", "\u0cff\u0d0d", "\u2fe0", "\U0001fbff", "\U000e0080", "\U000e0001",
    "\U0003ffff", "a\U0010ffffb", "\ufffe", "\uffff", "\ufdd0", "a\ufdd0\ufdd0b", "\ue000", "a\ue000b", "\U000f0000\U00100000", "\ufffd", "a\ufffd\ufffdb",
    "\ufe0f", "a\ufe0f", "\u20e3", "\u0488", "a\u0488", "\u0903", "\u093e", "\u200c", "\u1ab0", "\u3099か\u3099", "\u302a", "ᄒ\u1161\u11ab", "\u1100\u1161",
    "𝓗𝓮𝓵𝓵𝓸", "𝟎𝟏", "𐍈𐌰", "𓀀𓀁", "𒀀", "🀀", "\U0001d165", "\U0001d15e", "ℌ℮ℓℓo", "ⓐⓑ", "ªº", "ʰʷ", "ˈhɛloʊ", "ⅷⅸ", "㊀㊁", "㈠", "〇", "零", "𐄇", "೦೧",
    "a" * 10, "a" * 100, "ab" * 100, "the" * 60, "A" * 49, "z" * 48, "supercalifragilisticexpialidocious" * 4, "é" * 60, "你好" * 60, "😀" * 40,
    "กรุงเทพมหานครอมรรัตนโกสินทร์มหินทรายุธยามหาดิลกภพนพรัตนราชธานีบูรีรมย์", "Donaudampfschifffahrtsgesellschaftskapitän",
    "0" * 64, "9876543210" * 10, "-" * 80, "=" * 79 + "\n", "*" * 33, "." * 65, "#" * 7 + " Title", "|" + "---|" * 12, "~" * 50, "_" * 60, "/" * 55,
    "GATTACA" * 30, "0123456789abcdef" * 8, "dGhlIHF1aWNrIGJyb3duIGZveCBqdW1wcyBvdmVyIHRoZSBsYXp5IGRvZw==" * 3,
    "unto the LORD, and said,\nBehold,\n  I am\tthe king's son; 'tis well.\n\n", "KING HENRY V.\nOnce more unto the breach, dear friends, once more;\n",
    "foo: /foo/ n. A sample name for absolutely anything, esp. programs and files (esp. scratch files).",
]

PIECES = ["the", " king", "'s", "'LL", " ", "  ", "\n", "\r\n", "\t", "7", "42", "é", "e\u0301", "\u0301", "你", "好", "😀", "\u200d", "ก", "ำ", "न", "ि", "-",
          " —", "!", "...", "(", "_", "\u00a0", "\u3000", "<|im_end|>", "<think>", "</think>", "<|", "|>", "\u0378", "א", "ש\u05c1", "Ⅳ", "'", "\\", "A", "ß", "\x00"]


def texts():
    out = [t for line in PLAIN.strip().split("\n") for t in line.replace("<|", "\x02").replace("|>", "\x03").split("|")]
    escapes = {"\x02": "<|", "\x03": "|>", "\\n": "\n", "\\r": "\r", "\\t": "\t"}
    for written, meant in escapes.items():
        out = [t.replace(written, meant) for t in out]
    out += ESCAPED
    rng = random.Random(20260131)
    out += ["".join(rng.choices(PIECES, k=rng.randint(2, 14))) for _ in range(160)]
    return list(dict.fromkeys(out))


# ---------------------------------------------------------------- llama.cpp

class ModelParams(C.Structure):
    """The head of llama_model_params up to what is set here; the rest is room for the fields that follow."""
    _fields_ = [("devices", C.c_void_p), ("overrides", C.c_void_p), ("n_gpu_layers", C.c_int32), ("split_mode", C.c_int32),
                ("load_mode", C.c_int32),
                ("lazy_mode", C.c_int32), ("main_gpu", C.c_int32), ("tensor_split", C.c_void_p),
                ("progress", C.c_void_p), ("progress_user", C.c_void_p), ("kv_overrides", C.c_void_p), ("vocab_only", C.c_bool), ("rest", C.c_char * 256)]


class Llama:
    def __init__(self, folder):
        def load(stem):
            files = [f for f in glob.glob(os.path.join(folder, stem + ".*")) if os.path.isfile(f) and ".so" in f]
            return C.CDLL(min(files, key=len), mode=C.RTLD_GLOBAL)
        base, ggml, self.lib = load("libggml-base"), load("libggml"), load("libllama")
        lib, vp, i32 = self.lib, C.c_void_p, C.c_int32
        for name, result, arguments in [
            ("llama_model_default_params", ModelParams, []), ("llama_model_load_from_file", vp, [C.c_char_p, ModelParams]),
            ("llama_model_get_vocab", vp, [vp]), ("llama_model_free", None, [vp]), ("llama_log_set", None, [vp, vp]), ("llama_backend_init", None, []),
            ("llama_tokenize", i32, [vp, C.c_char_p, i32, C.POINTER(i32), i32, C.c_bool, C.c_bool]),
        ]:
            f = getattr(lib, name)
            f.restype, f.argtypes = result, arguments
        self.log = C.CFUNCTYPE(None, C.c_int, C.c_char_p, vp)(lambda level, text, user: print(text.decode(), end="") if level == 4 else None)
        lib.llama_log_set(C.cast(self.log, vp), None)
        lib.llama_backend_init()
        ggml.ggml_backend_load_all_from_path.argtypes = [C.c_char_p]
        ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
        base.ggml_version.restype = base.ggml_commit.restype = C.c_char_p
        self.version = f"ggml {base.ggml_version().decode()} {base.ggml_commit().decode()}"

    def load(self, path):
        params = self.lib.llama_model_default_params()
        assert params.split_mode == 1 and not params.vocab_only, "unknown layout of llama_model_params"
        params.vocab_only = True
        model = self.lib.llama_model_load_from_file(os.fsencode(path), params)
        assert model, path
        return model

    def tokenize(self, model, text, special):
        raw = text.encode()
        room = (C.c_int32 * (len(raw) + 16))()
        n = self.lib.llama_tokenize(self.lib.llama_model_get_vocab(model), raw, len(raw), room, len(room), False, special)
        assert n >= 0, text
        return list(room[:n])


# ---------------------------------------------------------------- vocabularies

ID_KEYS = {"bos": "bos_token_id", "eos": "eos_token_id", "eot": "eot_token_id", "pad": "padding_token_id"}


def spec_from_gguf(path):
    fields = gguf.GGUFReader(path).fields
    get = lambda key: fields["tokenizer." + key].contents() if "tokenizer." + key in fields else None
    spec = {"model": get("ggml.model"), "pre": get("ggml.pre"), "tokens": get("ggml.tokens"), "token_types": get("ggml.token_type"),
            "merges": get("ggml.merges")}
    spec |= {name: get("ggml." + key) for name, key in ID_KEYS.items()}
    return spec | {"add_bos": get("ggml.add_bos_token"), "chat_template": get("chat_template")}


def vocabulary_file(spec, path):
    w = gguf.GGUFWriter(path, "qwen3moe")
    w.add_tokenizer_model(spec["model"])
    w.add_tokenizer_pre(spec["pre"])
    w.add_token_list(spec["tokens"])
    w.add_token_types(spec["token_types"])
    w.add_token_merges(spec["merges"])
    for name, key in ID_KEYS.items():
        if spec[name] is not None:
            w.add_uint32("tokenizer.ggml." + key, spec[name])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--lib", required=True, help="folder of libllama")
    ap.add_argument("--out", required=True, help="folder of the *.spec.json and *.jsonl")
    ap.add_argument("--from-gguf", nargs="*", default=[], metavar="NAME=FILE")
    ap.add_argument("--pre", help="overrides the pattern's name in files read by --from-gguf")
    a = ap.parse_args()
    for item in a.from_gguf:
        name, path = item.split("=", 1)
        spec = spec_from_gguf(path)
        if a.pre:
            spec["pre"] = a.pre
        with open(os.path.join(a.out, name + ".spec.json"), "w", encoding="utf-8") as f:
            json.dump(spec, f, ensure_ascii=False, separators=(",", ":"))
            f.write("\n")
    llama, cases = Llama(a.lib), texts()
    for path in sorted(glob.glob(os.path.join(a.out, "*.spec.json"))):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "vocabulary.gguf")
            vocabulary_file(json.load(open(path, encoding="utf-8")), file)
            model = llama.load(file)
            with open(path.removesuffix(".spec.json") + ".jsonl", "w", encoding="utf-8") as f:
                for text in cases:
                    row = {"text": text, "parse": llama.tokenize(model, text, True), "plain": llama.tokenize(model, text, False)}
                    if row["plain"] == row["parse"]:
                        del row["plain"]
                    f.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
            llama.lib.llama_model_free(model)
        print(f"{path}: {len(cases)} texts, {llama.version}")


if __name__ == "__main__":
    main()
