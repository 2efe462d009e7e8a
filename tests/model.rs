//! Goal: whatever a file's metadata says, it is refused with the key and the rule, or it runs right; and the same weights give the
//! same tokens however the file arranges them. Method: a synthetic file is taken apart, changed and opened again.

mod common;

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use common::engine::{TempFile, all_logits, engine, exact_settings, greedy, run, settings, synthetic_model, tokens};
use common::rewrite::{Gguf, Tensor, Value};
use common::synthetic::Synthetic;
use ebbtide::model::Model;
use ebbtide::quant::QuantType;
use ebbtide::settings::{ChunkSetting, EngineSettings, ExpertCache};
use ebbtide::units::TokenId;

const ARGS: &str = "--shape micro --seed 9 --type Q8_0";

fn file(args: &str) -> Gguf {
    Gguf::parse(&Synthetic::from_args(args).expect("valid arguments").file_bytes().expect("a small model"))
}

static SOUND: LazyLock<Gguf> = LazyLock::new(|| file(ARGS));

fn open(gguf: &Gguf) -> Result<Model, String> {
    let file = TempFile::new(".gguf");
    gguf.write(&file.0);
    Model::open(&file.0).map_err(|error| error.to_string())
}

fn model(gguf: &Gguf) -> Arc<Model> {
    Arc::new(open(gguf).expect("a sound model"))
}

/// Changes the sound file; the refusal must say all of `wanted`.
fn refused(change: impl FnOnce(&mut Gguf), wanted: &[&str]) {
    let mut gguf = SOUND.clone();
    change(&mut gguf);
    let error = open(&gguf).err().unwrap_or_else(|| panic!("must be refused: {wanted:?}"));
    for part in wanted {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

fn set(key: &'static str, value: Value) -> impl FnOnce(&mut Gguf) {
    move |gguf| gguf.set(&format!("qwen3moe.{key}"), value)
}

#[test]
fn a_key_that_is_missing_is_named() {
    for key in [
        "block_count",
        "embedding_length",
        "attention.head_count",
        "expert_count",
        "expert_used_count",
        "context_length",
        "attention.layer_norm_rms_epsilon",
    ] {
        refused(|gguf| gguf.remove(&format!("qwen3moe.{key}")), &[&format!("qwen3moe.{key}")]);
    }
    refused(|gguf| gguf.remove("general.architecture"), &["general.architecture"]);
}

#[test]
fn a_key_of_a_wrong_type_or_size_is_named_with_its_value() {
    for key in ["block_count", "embedding_length", "attention.head_count", "expert_count", "expert_used_count", "context_length"] {
        refused(set(key, Value::string("many")), &[key, "many"]);
        refused(set(key, Value::u32(0)), &[key, "is 0"]);
        refused(set(key, Value::u32(u32::MAX)), &[key, "4294967295"]);
        refused(set(key, Value::u64(1 << 40)), &[key, "1099511627776"]);
    }
    for bad in [f32::NAN, f32::INFINITY, -1.0] {
        refused(set("attention.layer_norm_rms_epsilon", Value::f32(bad)), &["attention.layer_norm_rms_epsilon"]);
    }
    refused(set("rope.freq_base", Value::f32(0.0)), &["rope.freq_base"]);
    refused(set("expert_feed_forward_length", Value::u32s(&[256])), &["expert_feed_forward_length"]);
    refused(set("expert_feed_forward_length", Value::u32s(&[256, 128])), &["expert_feed_forward_length", "not the same for all layers"]);
}

#[test]
fn sizes_that_make_no_sense_together_are_refused_with_the_rule() {
    refused(set("expert_used_count", Value::u32(9)), &["expert_used_count is 9", "there are 8 experts"]);
    refused(set("attention.head_count_kv", Value::u32(3)), &["attention.head_count_kv is 3", "4 query heads"]);
    refused(set("attention.key_length", Value::u32(48)), &["attention.key_length is 48", "multiple of 32"]);
    refused(set("attention.value_length", Value::u32(32)), &["attention.value_length is 32", "keys have 64"]);
    refused(set("rope.dimension_count", Value::u32(63)), &["rope.dimension_count is 63", "even"]);
    refused(set("rope.dimension_count", Value::u32(66)), &["rope.dimension_count is 66", "at most the head size 64"]);
    // Without a key length it follows from the width: 256 / 512 heads is nothing.
    let no_width = |gguf: &mut Gguf| {
        for key in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
            gguf.remove(&format!("qwen3moe.{key}"));
        }
        gguf.set("qwen3moe.attention.head_count", Value::u32(512));
    };
    refused(no_width, &["attention.key_length is 0"]);
}

#[test]
fn products_of_sizes_that_leave_32_bits_are_refused() {
    let wide = |gguf: &mut Gguf| {
        gguf.set("qwen3moe.attention.head_count", Value::u32(1 << 20));
        for key in ["attention.key_length", "attention.value_length"] {
            gguf.set(&format!("qwen3moe.{key}"), Value::u32(1 << 14));
        }
    };
    refused(wide, &["attention.key_length is 16384", "1048576 heads"]);
    let many = |gguf: &mut Gguf| {
        gguf.set("qwen3moe.block_count", Value::u32(1 << 20));
        gguf.set("qwen3moe.expert_count", Value::u32(1 << 20));
    };
    refused(many, &["expert_count is 1048576", "1048576 layers"]);
}

#[test]
fn tensors_that_disagree_with_the_metadata_are_named_with_both_shapes() {
    refused(set("embedding_length", Value::u32(512)), &["token_embd.weight", "[512, 256]", "[512, 512]"]);
    refused(set("expert_count", Value::u32(7)), &["blk.0.ffn_gate_inp.weight", "[8, 256]", "[7, 256]"]);
    refused(set("block_count", Value::u32(3)), &["blk.2.attn_norm.weight", "missing"]);
    refused(set("expert_feed_forward_length", Value::u32(128)), &["blk.0.ffn_gate_exps.weight", "[8, 256, 256]", "[8, 128, 256]"]);
    for name in ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight", "blk.1.ffn_down_exps.weight"] {
        refused(|gguf| drop(gguf.take_tensor(name)), &[name, "missing"]);
    }
    refused(|gguf| gguf.tensor_mut("token_embd.weight").dims = vec![256 * 512], &["token_embd.weight"]);
}

#[test]
fn what_this_version_cannot_do_is_said() {
    refused(|gguf| gguf.set("general.architecture", Value::string("llama")), &["'llama' is not supported", "qwen3moe"]);
    refused(set("rope.scaling.type", Value::string("yarn")), &["rope.scaling.type is yarn", "no rope scaling"]);
    refused(set("rope.scaling.factor", Value::f32(4.0)), &["rope.scaling.factor is 4", "no rope scaling"]);
    for (key, value) in [("rope.scaling.type", Value::string("none")), ("rope.scaling.factor", Value::f32(1.0))] {
        let mut gguf = SOUND.clone();
        gguf.set(&format!("qwen3moe.{key}"), value);
        assert!(open(&gguf).is_ok(), "{key} changes nothing");
    }
    let scaled =
        |gguf: &mut Gguf| gguf.tensors.push(Tensor { data: vec![0; 4], ..Tensor::empty("blk.1.ffn_up_exps.scale", &[1], QuantType::F32) });
    refused(scaled, &["blk.1.ffn_up_exps.weight", "factors of their own"]);
    refused(
        |gguf| {
            let tensor = gguf.tensor_mut("blk.0.attn_norm.weight");
            tensor.quant = QuantType::F16;
            tensor.data.truncate(512);
        },
        &["blk.0.attn_norm.weight", "F16", "must be F32"],
    );
    let mixed = file("--shape micro --seed 9 --type Q8_0 --up-type Q4_K");
    let error = open(&mixed).err().expect("blocks of 32 beside blocks of 256");
    assert!(error.contains("blk.0.ffn_up_exps.weight") && error.contains("Q4_K") && error.contains("one length"), "{error}");
}

#[test]
fn one_width_for_all_layers_may_be_written_as_an_array_or_as_a_sum() {
    let expected = open(&SOUND).expect("sound").shape;
    for (key, value) in [("expert_feed_forward_length", Value::u32s(&[256, 256])), ("attention.head_count_kv", Value::u32s(&[2, 2]))] {
        let mut gguf = SOUND.clone();
        gguf.set(&format!("qwen3moe.{key}"), value);
        assert_eq!(open(&gguf).expect(key).shape, expected);
    }
    let mut gguf = SOUND.clone();
    gguf.remove("qwen3moe.expert_feed_forward_length");
    assert_eq!(open(&gguf).expect("the sum over the experts used is there").shape, expected);
}

fn logits(model: &Arc<Model>) -> Vec<Vec<f32>> {
    all_logits(&mut engine(model, &exact_settings(64)), &tokens(3, 24, 500))
}

fn written(model: &Arc<Model>, settings: &EngineSettings) -> Vec<TokenId> {
    run(&mut engine(model, settings), &greedy(&tokens(4, 60, 500), 24)).tokens
}

fn deterministic(slots: u32) -> EngineSettings {
    let base = settings(256);
    EngineSettings { deterministic: true, expert_cache: ExpertCache::Slots(slots), chunk: ChunkSetting::Tokens(32), ..base }
}

/// Gate and up of every layer in one tensor: an expert's gate rows, then its up rows.
fn joined(mut gguf: Gguf) -> Gguf {
    for layer in 0..2 {
        let gate = gguf.take_tensor(&format!("blk.{layer}.ffn_gate_exps.weight"));
        let up = gguf.take_tensor(&format!("blk.{layer}.ffn_up_exps.weight"));
        let expert_bytes = gate.data.len() / 8;
        let experts = gate.data.chunks(expert_bytes).zip(up.data.chunks(expert_bytes));
        let data = experts.flat_map(|(gate, up)| [gate, up].concat()).collect();
        let name = format!("blk.{layer}.ffn_gate_up_exps.weight");
        gguf.tensors.push(Tensor { name, dims: vec![256, 512, 8], quant: gate.quant, data });
    }
    gguf
}

#[test]
fn gate_and_up_in_one_tensor_give_the_same_logits() {
    let (split, joined) = (model(&SOUND), model(&joined(SOUND.clone())));
    assert_eq!(logits(&split), logits(&joined));
    for slots in [1, 5, 16] {
        assert_eq!(written(&split, &deterministic(slots)), written(&joined, &deterministic(slots)), "{slots} slots");
    }
}

#[test]
fn a_tied_head_is_the_embedding() {
    let tied = file(&format!("{ARGS} --tied"));
    let mut untied = tied.clone();
    let embedding = tied.tensors.iter().find(|tensor| tensor.name == "token_embd.weight").expect("an embedding").clone();
    untied.tensors.push(Tensor { name: "output.weight".to_owned(), ..embedding });
    let (tied, untied) = (model(&tied), model(&untied));
    assert_eq!(tied.weights.head.bytes, tied.weights.token_embd.bytes);
    assert_eq!(logits(&tied), logits(&untied));
    let lent = EngineSettings { head_alias: true, alias_min_tokens: ebbtide::settings::AliasThreshold::Tokens(0), ..deterministic(4) };
    assert_eq!(written(&tied, &lent), written(&untied, &deterministic(16)), "a tied head can be lent too");
}

#[test]
fn layers_of_different_expert_types_share_slots_and_keep_their_hits() {
    // Layer 1 has its experts in another type, in other sizes.
    let mut gguf = file("--shape micro --seed 9 --type Q4_K");
    let other = file("--shape micro --seed 9 --type Q6_K");
    for part in ["gate", "up", "down"] {
        let name = format!("blk.1.ffn_{part}_exps.weight");
        *gguf.tensor_mut(&name) = other.tensors.iter().find(|tensor| tensor.name == name).expect("the same names").clone();
    }
    // One matrix of a layer may differ from its neighbours, too.
    let down = file("--shape micro --seed 9 --type Q8_0").take_tensor("blk.0.ffn_down_exps.weight");
    *gguf.tensor_mut("blk.0.ffn_down_exps.weight") = down;
    let mixed = model(&gguf);
    let sizes: Vec<_> = mixed.weights.experts.iter().map(ebbtide::model::weights::LayerExperts::slot_bytes).collect();
    assert!(sizes[0] != sizes[1] && mixed.weights.slot_bytes() == *sizes.iter().max().expect("two layers"));
    let expected = written(&mixed, &deterministic(16));
    for slots in [1, 4, 7, 12] {
        assert_eq!(written(&mixed, &deterministic(slots)), expected, "{slots} slots");
    }
    let mut engine = engine(&mixed, &deterministic(8));
    let request = greedy(&tokens(4, 60, 500), 24);
    run(&mut engine, &request);
    let again = run(&mut engine, &request);
    assert_eq!(again.tokens, expected);
    assert!(again.experts.hits > 0 && again.experts.misses > 0, "{:?}", again.experts);
}

#[test]
fn dense_matrices_of_mixed_types_run() {
    let mut gguf = file("--shape micro --seed 9 --type Q4_K");
    for (name, args) in [("blk.0.attn_v.weight", "Q8_0"), ("blk.1.attn_k.weight", "F16"), ("blk.1.attn_output.weight", "Q6_K")] {
        *gguf.tensor_mut(name) = file(&format!("--shape micro --seed 9 --type {args}")).take_tensor(name);
    }
    let mixed = model(&gguf);
    assert!(logits(&mixed).iter().flatten().all(|logit| logit.is_finite()));
    assert_eq!(written(&mixed, &deterministic(2)), written(&mixed, &deterministic(16)));
}

#[test]
fn an_embedding_may_have_any_type() {
    for quant in ["F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "IQ4_XS", "IQ3_XXS", "IQ2_S"] {
        let model = synthetic_model(&format!("{ARGS} --embd-type {quant}"));
        assert!(logits(&model).iter().flatten().all(|logit| logit.is_finite()), "{quant}");
    }
}

struct Shards(PathBuf);

impl Drop for Shards {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_model_in_three_files_gives_the_same_tokens_from_any_of_them() {
    let folder = Shards(TempFile::new("-shards").0.clone());
    std::fs::create_dir_all(&folder.0).expect("the temporary folder can be written");
    let n_tensors = u32::try_from(SOUND.tensors.len()).expect("few");
    let path = |number: u32| folder.0.join(format!("model-{number:05}-of-00003.gguf"));
    for number in 0..3u32 {
        let mut shard = Gguf { pairs: if number == 0 { SOUND.pairs.clone() } else { Vec::new() }, tensors: Vec::new() };
        shard.set("split.no", Value::u32(number));
        shard.set("split.count", Value::u32(3));
        shard.set("split.tensors.count", Value::u32(n_tensors));
        // Every third tensor, so that the parts of an expert lie in different files.
        shard.tensors = SOUND.tensors.iter().skip(number as usize).step_by(3).cloned().collect();
        shard.write(&path(number + 1));
    }
    let expected = written(&model(&SOUND), &deterministic(16));
    for path in [path(1), path(3), folder.0.clone()] {
        let split = Arc::new(Model::open(&path).expect("all three are there"));
        for slots in [2, 16] {
            assert_eq!(written(&split, &deterministic(slots)), expected, "{}", path.display());
        }
    }
}
