"""A thin ctypes layer over llama.cpp's shared library: enough to get logits of every position.

The library is looked for in: the folder given, $ORACLE_LLAMA_LIB, .oracle/ of the repository (tools/setup_oracle.sh),
an installed llama_cpp module, node_modules of the working folder and its parents.

Structure layouts are those of llama.cpp 0.5.0 (September 2026) up to the sources that
llama-cpp-python 0.3.36 builds; open() checks a few defaults so that another layout fails loudly.
"""
import ctypes as C
import glob
import importlib.util
import os

import numpy as np


class ModelParams(C.Structure):
    _fields_ = [("devices", C.c_void_p), ("tensor_buft_overrides", C.c_void_p), ("n_gpu_layers", C.c_int32),
                ("split_mode", C.c_int), ("load_mode", C.c_int), ("lazy_mode", C.c_int), ("main_gpu", C.c_int32),
                ("tensor_split", C.c_void_p), ("progress_callback", C.c_void_p), ("progress_user", C.c_void_p),
                ("kv_overrides", C.c_void_p), ("vocab_only", C.c_bool), ("check_tensors", C.c_bool),
                ("use_extra_bufts", C.c_bool), ("no_host", C.c_bool), ("no_alloc", C.c_bool), ("load_mtp", C.c_bool)]


class ContextParams(C.Structure):
    _fields_ = [("n_ctx", C.c_uint32), ("n_batch", C.c_uint32), ("n_ubatch", C.c_uint32), ("n_seq_max", C.c_uint32),
                ("n_rs_seq", C.c_uint32), ("n_outputs_max", C.c_uint32), ("n_outputs_max_per_seq", C.c_uint32),
                ("n_threads", C.c_int32), ("n_threads_batch", C.c_int32), ("ctx_type", C.c_int),
                ("rope_scaling_type", C.c_int), ("pooling_type", C.c_int), ("attention_type", C.c_int),
                ("flash_attn_type", C.c_int), ("rope_freq_base", C.c_float), ("rope_freq_scale", C.c_float),
                ("yarn_ext_factor", C.c_float), ("yarn_attn_factor", C.c_float), ("yarn_beta_fast", C.c_float),
                ("yarn_beta_slow", C.c_float), ("yarn_orig_ctx", C.c_uint32), ("defrag_thold", C.c_float),
                ("cb_eval", C.c_void_p), ("cb_eval_user_data", C.c_void_p), ("type_k", C.c_int), ("type_v", C.c_int),
                ("abort_callback", C.c_void_p), ("abort_callback_data", C.c_void_p), ("embeddings", C.c_bool),
                ("offload_kqv", C.c_bool), ("no_perf", C.c_bool), ("op_offload", C.c_bool), ("swa_full", C.c_bool),
                ("kv_unified", C.c_bool), ("samplers", C.c_void_p), ("n_samplers", C.c_size_t),
                ("ctx_other", C.c_void_p)]


class Batch(C.Structure):
    _fields_ = [("n_tokens", C.c_int32), ("token", C.POINTER(C.c_int32)), ("embd", C.POINTER(C.c_float)),
                ("pos", C.POINTER(C.c_int32)), ("n_seq_id", C.POINTER(C.c_int32)),
                ("seq_id", C.POINTER(C.POINTER(C.c_int32))), ("logits", C.POINTER(C.c_int8))]


LOG = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)
NEXTN = {"set": "_Z26llama_set_embeddings_nextnP13llama_contextbb",
         "get": "_Z26llama_get_embeddings_nextnP13llama_context"}
F32, F16 = 0, 1


PACKAGE = "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
ORACLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../.oracle")


def find(folder=None):
    spots = [folder, os.environ.get("ORACLE_LLAMA_LIB"), os.path.join(ORACLE, PACKAGE)]
    spec = importlib.util.find_spec("llama_cpp")
    if spec and spec.origin:
        spots.append(os.path.join(os.path.dirname(spec.origin), "lib"))
    here = os.getcwd()
    while True:
        spots.append(os.path.join(here, PACKAGE))
        if here == os.path.dirname(here):
            break
        here = os.path.dirname(here)
    for s in spots:
        if s and glob.glob(os.path.join(s, "libllama*.so*")):
            return s
    raise FileNotFoundError("no libllama: run tools/setup_oracle.sh, pass --lib or set ORACLE_LLAMA_LIB")


def _pick(folder, stem):
    names = [p for p in glob.glob(os.path.join(folder, stem + "*.so*"))
             if os.path.basename(p)[len(stem):][:1] == "." and os.path.isfile(p)]
    if not names:
        raise FileNotFoundError(f"{stem} in {folder}")
    return min(names, key=len)


class Lib:
    def __init__(self, folder=None, quiet=True):
        self.folder = find(folder)
        self.base = C.CDLL(_pick(self.folder, "libggml-base"), mode=C.RTLD_GLOBAL)
        self.ggml = C.CDLL(_pick(self.folder, "libggml"), mode=C.RTLD_GLOBAL)
        self.l = C.CDLL(_pick(self.folder, "libllama"), mode=C.RTLD_GLOBAL)
        L = self.l
        vp, i32 = C.c_void_p, C.c_int32
        for name, res, args in [
            ("llama_model_default_params", ModelParams, []), ("llama_context_default_params", ContextParams, []),
            ("llama_model_load_from_file", vp, [C.c_char_p, ModelParams]), ("llama_model_free", None, [vp]),
            ("llama_init_from_model", vp, [vp, ContextParams]), ("llama_free", None, [vp]),
            ("llama_model_get_vocab", vp, [vp]), ("llama_vocab_n_tokens", i32, [vp]), ("llama_vocab_eos", i32, [vp]),
            ("llama_model_n_embd", i32, [vp]), ("llama_decode", i32, [vp, Batch]),
            ("llama_get_logits_ith", C.POINTER(C.c_float), [vp, i32]), ("llama_get_memory", vp, [vp]),
            ("llama_memory_clear", None, [vp, C.c_bool]),
            ("llama_tokenize", i32, [vp, C.c_char_p, i32, C.POINTER(i32), i32, C.c_bool, C.c_bool]),
            ("llama_token_to_piece", i32, [vp, i32, C.c_char_p, i32, i32, C.c_bool]),
            ("llama_print_system_info", C.c_char_p, []), ("llama_log_set", None, [vp, vp]),
            ("llama_backend_init", None, []),
        ]:
            f = getattr(L, name)
            f.restype, f.argtypes = res, args
        self._log = LOG(lambda level, text, user: None if quiet and level != 4 else print(text.decode("utf-8", "replace"), end=""))
        L.llama_log_set(C.cast(self._log, vp), None)
        L.llama_backend_init()
        if glob.glob(os.path.join(self.folder, "libggml-cpu-*.so")):      # CPU code in loadable variants
            self.ggml.ggml_backend_load_all_from_path.argtypes = [C.c_char_p]
            self.ggml.ggml_backend_load_all_from_path(self.folder.encode())
        c = L.llama_context_default_params()
        assert c.n_batch == 2048 and c.n_ubatch == 512 and c.type_k == F16 and c.type_v == F16, "unknown context layout"

    def version(self):
        out = []
        for fn in ("ggml_version", "ggml_commit"):
            f = getattr(self.base, fn, None)
            if f:
                f.restype = C.c_char_p
                out.append(f().decode())
        return "ggml " + " ".join(out)

    def quantize(self, x, type_id, imatrix=None):
        """Quantise float32 rows [n, k] to a ggml type; IQ1 and IQ2 types need a weight per column."""
        x = np.ascontiguousarray(x, np.float32)
        self.base.ggml_row_size.restype = C.c_size_t
        self.base.ggml_row_size.argtypes = [C.c_int, C.c_int64]
        out = np.empty((x.shape[0], self.base.ggml_row_size(type_id, x.shape[1])), np.uint8)
        q = self.base.ggml_quantize_chunk
        q.restype = C.c_size_t
        q.argtypes = [C.c_int, C.c_void_p, C.c_void_p, C.c_int64, C.c_int64, C.c_int64, C.c_void_p]
        w = None if imatrix is None else np.ascontiguousarray(imatrix, np.float32)
        q(type_id, x.ctypes.data, out.ctypes.data, 0, x.shape[0], x.shape[1], None if w is None else w.ctypes.data)
        return out


class Override(C.Structure):
    _fields_ = [("pattern", C.c_char_p), ("buft", C.c_void_p)]


class Model:
    def __init__(self, lib, path, mtp=False, gpu_layers=0, experts_in_ram=0, pinned=False):
        """experts_in_ram: keep the routed experts of this many first layers in host memory.

        pinned: load instead of mapping the file, so that host memory is page-locked (llama-bench -lm none):
        prompts are 3 to 5 times faster than from the map, which is the library's default."""
        self.lib = lib
        p = lib.l.llama_model_default_params()
        p.n_gpu_layers, p.load_mtp = gpu_layers, mtp
        if pinned:
            p.load_mode = 0
        if experts_in_ram:
            by_type, buft = lib.ggml.ggml_backend_dev_by_type, lib.base.ggml_backend_dev_buffer_type
            by_type.restype = buft.restype = C.c_void_p
            by_type.argtypes, buft.argtypes = [C.c_int], [C.c_void_p]
            host = buft(by_type(0))
            self.over = (Override * (experts_in_ram + 1))()
            for i in range(experts_in_ram):
                self.over[i] = Override(rb"blk\.%d\.ffn_(up|down|gate|gate_up)_exps" % i, host)
            p.tensor_buft_overrides = C.cast(self.over, C.c_void_p)
        self.m = lib.l.llama_model_load_from_file(os.fsencode(path), p)
        if not self.m:
            raise RuntimeError(f"{path}: the library cannot load it")
        self.vocab = lib.l.llama_model_get_vocab(self.m)
        self.n_vocab = lib.l.llama_vocab_n_tokens(self.vocab)
        self.n_embd = lib.l.llama_model_n_embd(self.m)

    def tokenize(self, text, special=True):
        raw = text.encode()
        buf = (C.c_int32 * (len(raw) + 16))()
        n = self.lib.l.llama_tokenize(self.vocab, raw, len(raw), buf, len(buf), False, special)
        return list(buf[:n])

    def piece(self, token, special=True):
        buf = C.create_string_buffer(512)
        n = self.lib.l.llama_token_to_piece(self.vocab, token, buf, 512, 0, special)
        return buf.raw[:max(n, 0)]

    def context(self, n_ctx, kv_type=F32, threads=None, mtp=False, flash=False, ubatch=512, nextn=False):
        return Context(self, n_ctx, kv_type, threads or os.cpu_count(), mtp, flash, ubatch, nextn)


class Context:
    def __init__(self, model, n_ctx, kv_type, threads, mtp, flash, ubatch, nextn):
        self.model, self.lib = model, model.lib
        p = self.lib.l.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch = n_ctx, max(n_ctx, 32), ubatch
        p.type_k = p.type_v = kv_type
        p.n_threads = p.n_threads_batch = threads
        p.flash_attn_type = 1 if flash else 0
        p.ctx_type = 1 if mtp else 0
        self.c = self.lib.l.llama_init_from_model(model.m, p)
        if not self.c:
            raise RuntimeError("no context")
        if nextn or mtp:
            f = getattr(self.lib.l, NEXTN["set"])
            f.argtypes = [C.c_void_p, C.c_bool, C.c_bool]
            f(self.c, True, False)

    def decode(self, tokens, start=0, hidden=None, want="all"):
        """Run tokens at positions start..; returns logits [n, vocab], or [1, vocab] if want is "last".

        hidden: the draft block's input rows."""
        n = len(tokens)
        tok = np.asarray(tokens, np.int32)
        pos = np.arange(start, start + n, dtype=np.int32)
        one, zero, out = np.ones(n, np.int32), C.c_int32(0), np.ones(n, np.int8)
        if want == "last":
            out[:-1] = 0
        seq = (C.POINTER(C.c_int32) * n)(*[C.pointer(zero)] * n)
        i32p = C.POINTER(C.c_int32)
        h = None if hidden is None else np.ascontiguousarray(hidden, np.float32)
        b = Batch(n, tok.ctypes.data_as(i32p), None if h is None else h.ctypes.data_as(C.POINTER(C.c_float)),
                  pos.ctypes.data_as(i32p), one.ctypes.data_as(i32p), seq, out.ctypes.data_as(C.POINTER(C.c_int8)))
        rc = self.lib.l.llama_decode(self.c, b)
        if rc:
            raise RuntimeError(f"decode returned {rc}")
        V = self.model.n_vocab
        return np.stack([np.ctypeslib.as_array(self.lib.l.llama_get_logits_ith(self.c, i), (V,)).copy()
                         for i in range(n) if out[i]])

    def nextn_rows(self, n):
        """Hidden rows after the final norm, one for each token of the last decode."""
        f = getattr(self.lib.l, NEXTN["get"])
        f.restype, f.argtypes = C.POINTER(C.c_float), [C.c_void_p]
        return np.ctypeslib.as_array(f(self.c), (n, self.model.n_embd)).copy()

    def clear(self):
        self.lib.l.llama_memory_clear(self.lib.l.llama_get_memory(self.c), True)
