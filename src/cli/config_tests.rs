use std::ffi::OsString;

use super::*;
use crate::cli::sources::{Environment, resolve};
use crate::settings::{Activations, DraftSetting, DraftSettings, KvType, SpecSetting};

/// A command line and an environment, as the whole of it is understood.
pub fn checked(line: &str, environment: &[(&str, &str)]) -> Result<Config, Refused> {
    let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
    let environment: Environment = environment.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    check(resolve(&words, &environment).expect(line))
}

fn refusals(line: &str) -> Vec<String> {
    checked(line, &[]).expect_err(line).0
}

fn command(line: &str) -> Command {
    checked(line, &[]).expect(line).command
}

#[test]
fn defaults_are_those_of_the_engine() {
    let Command::Plan(plan) = command("ebbtide plan -m m.gguf") else { panic!("a plan was asked for") };
    let defaults = EngineSettings::default();
    // A card is used as far as it goes.
    let vram = if crate::backends::RUNS_ON_CARDS { Bytes::mib(MEMORY_MIB_MAX) } else { defaults.vram };
    let expected = EngineSettings { threads: processors(), prefix_cache: Bytes::mib(512), vram, ..defaults };
    assert_eq!(plan.engine, expected);
    let Command::Logits(logits) = command("ebbtide logits -m m.gguf --tokens 1,2 -o o.npy") else { panic!("logits") };
    assert_eq!((logits.engine.kv, logits.engine.activations), (KvType::F32, Activations::F32));
    assert_eq!(logits.tokens, TokenSource::List(vec![1, 2]));
}

#[test]
fn every_setting_reaches_the_engine() {
    let line = "ebbtide plan -m m.gguf --vram-mib 4000 --vram-reserve-mib 100 --pin-mib 0 --ctx 2048 --kv q8_0 --expert-cache 40 \
        --expert-profile p --prefix-cache-mib 100 --prefill 512 --prefill-block 512 --prefill-head-alias --head-alias-mode realloc \
        --cache-sizing seed --alias-min-tokens 0 --short-read 5 --refill strict \
        --activations f32 --deterministic --window-hashes h --threads 3 --device host --spec 2 --draft mtp --spec-min-p 0.25";
    let Command::Plan(plan) = command(line) else { panic!("a plan was asked for") };
    let expected = EngineSettings {
        vram: Bytes::mib(4000),
        vram_reserve: Some(Bytes::mib(100)),
        pin: Some(Bytes::ZERO),
        ctx: ContextSetting::Tokens(2048),
        kv: KvType::Q8_0,
        prefix_cache: Bytes::mib(100),
        expert_cache: crate::settings::ExpertCache::Slots(40),
        expert_profile: Some(PathBuf::from("p")),
        chunk: ChunkSetting::Tokens(512),
        block: BlockSetting::Tokens(512),
        head_alias: true,
        head_alias_mode: HeadAliasMode::Realloc,
        cache_sizing: CacheSizing::Seed,
        alias_min_tokens: AliasThreshold::Tokens(0),
        short_read: crate::settings::ShortRead::Tokens(5),
        refill: crate::settings::Refill::Strict,
        drafts: DraftSettings { source: DraftSetting::Mtp, most: SpecSetting::Drafts(2), min_p: 0.25, ..DraftSettings::default() },
        activations: Activations::F32,
        deterministic: true,
        window_hashes: Some(PathBuf::from("h")),
        threads: 3,
        device: DeviceSetting::Host,
    };
    assert_eq!(plan.engine, expected);
}

#[test]
fn the_alias_is_refused_where_every_row_needs_the_head() {
    for line in ["ebbtide logits -m m --tokens 1 -o o --prefill-head-alias", "ebbtide perplexity -m m --tokens c.u16 --prefill-head-alias"]
    {
        let command = line.split_whitespace().nth(1).expect("a command");
        let refusals = refusals(line);
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        assert!(refusals[0].starts_with(&format!("--prefill-head-alias with {command}: ")), "{refusals:?}");
        assert!(checked(&format!("{line}=false"), &[]).is_ok());
    }
    for line in ["ebbtide run -m m -p x", "ebbtide plan -m m", "ebbtide demo", "ebbtide config"] {
        assert!(checked(&format!("{line} --prefill-head-alias"), &[]).is_ok(), "{line}");
    }
    let elsewhere = checked("ebbtide logits -m m --tokens 1 -o o", &[("EBBTIDE_PREFILL_HEAD_ALIAS", "1")]).expect_err("refused");
    assert!(elsewhere.0[0].starts_with("--prefill-head-alias 1 (from EBBTIDE_PREFILL_HEAD_ALIAS) with logits"), "{elsewhere}");
}

#[test]
fn ways_of_lending_the_head_are_refused_where_it_is_not_lent() {
    let told = refusals("ebbtide run -m m -p x --head-alias-mode realloc --cache-sizing seed --vram-reserve-mib 9000");
    let starts = [
        "--vram-reserve-mib 9000 with --vram-mib 8192",
        "--head-alias-mode realloc without --prefill-head-alias: ",
        "--cache-sizing seed without --prefill-head-alias: ",
    ];
    assert!(told.len() == 3 && starts.iter().zip(&told).all(|(start, refusal)| refusal.starts_with(start)), "{told:#?}");
    for mode in ["--head-alias-mode realloc", "--cache-sizing seed", "--head-alias-mode realloc --cache-sizing seed"] {
        assert!(checked(&format!("ebbtide plan -m m --prefill-head-alias {mode}"), &[]).is_ok(), "{mode}");
    }
    assert!(checked("ebbtide plan -m m --head-alias-mode overlay --cache-sizing exact", &[]).is_ok());
}

#[test]
fn all_refusals_come_at_once_and_each_names_what_clashes() {
    let told = refusals(
        "ebbtide logits --prefill-head-alias --sim-link-us 3 --prefill-block 256 --prefill 512 --vram-mib 100 \
         --vram-reserve-mib 100",
    );
    let starts = [
        "--sim-link-us 3 is not in this version: ",
        "--prefill-head-alias with logits: ",
        "--prefill-block 256 with --prefill 512: ",
        "--vram-reserve-mib 100 with --vram-mib 100: ",
        "missing: the model: ",
        "missing: one of --tokens",
        "missing: the file to write: ",
    ];
    for start in starts {
        assert!(told.iter().any(|refusal| refusal.starts_with(start)), "{start} in {told:#?}");
    }
    assert_eq!(told.len(), starts.len());
}

#[test]
fn what_is_to_come_is_refused_and_never_left_out() {
    for later in NOT_YET {
        let told = refusals(&format!("ebbtide run -m m -p x --{}=3", later.flag));
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].contains("is not in this version: "), "{told:?}");
        for accepted in later.accepts {
            let line = format!("ebbtide run -m m -p x --{}={accepted}", later.flag);
            assert!(checked(&line, &[]).is_ok(), "{line}");
        }
    }
}

#[test]
fn logits_of_the_draft_layer_go_to_a_file_of_their_own() {
    let Command::Logits(logits) = command("ebbtide logits -m m --tokens 1 -o o --mtp-out p") else { panic!("logits") };
    assert_eq!((logits.output, logits.mtp_output), (PathBuf::from("o"), Some(PathBuf::from("p"))));
    let told = refusals("ebbtide logits -m m --tokens 1 -o o --mtp-out o");
    assert_eq!(told, ["--mtp-out o with -o o: both would be one file. Name another one"]);
}

#[test]
fn a_flag_that_leaves_no_choice_yet_is_not_in_the_help() {
    let command = crate::cli::args::command();
    for later in NOT_YET {
        let mut of_name = command.get_subcommands().flat_map(clap::Command::get_arguments);
        assert!(of_name.any(|arg| arg.get_long() == Some(later.flag) && arg.is_hide_set()), "{}", later.flag);
    }
}

#[test]
fn a_block_is_no_shorter_than_a_chunk_that_was_asked_for() {
    for line in ["--prefill 512 --prefill-block 512", "--prefill 512 --prefill-block 4096", "--prefill-block 64", "--prefill-block chunk"] {
        assert!(checked(&format!("ebbtide plan -m m {line}"), &[]).is_ok(), "{line}");
    }
    let refusal = &refusals("ebbtide plan -m m --prefill 512 --prefill-block 64")[0];
    assert!(refusal.starts_with("--prefill-block 64 with --prefill 512: ") && refusal.contains("lower --prefill"), "{refusal}");
}

#[test]
fn one_prompt_is_needed_and_a_typed_one_goes_before_the_environment_s() {
    let Command::Run(run) = command("ebbtide run -m m --tokens 5,6") else { panic!("a run was asked for") };
    assert_eq!(run.prompt, PromptSource::Tokens(TokenSource::List(vec![5, 6])));
    let told = refusals("ebbtide run -m m -p x --prompt-file f");
    assert_eq!(told, ["--prompt x with --prompt-file f: both say what to read. Leave one of them out"]);
    assert_eq!(refusals("ebbtide run -m m"), ["missing: one of --prompt or --prompt-file or --tokens"]);
    let config = checked("ebbtide run -m m --prompt-file f", &[("EBBTIDE_PROMPT", "x")]).expect("the typed one");
    let Command::Run(run) = config.command else { panic!("a run was asked for") };
    assert_eq!(run.prompt, PromptSource::File(PathBuf::from("f")));
    assert_eq!(refusals("ebbtide run -m m --tokens 1 --chat").len(), 1);
    assert!(refusals("ebbtide run -m m --tokens 1,x")[0].starts_with("--tokens: the list: entry 2 is `x`"));
}

#[test]
fn text_and_tokens_may_be_bare_arguments() {
    let Command::Tokenize(tokenize) = command("ebbtide tokenize -m m hello") else { panic!("tokenize was asked for") };
    assert_eq!(tokenize.text, PromptSource::Text("hello".to_owned()));
    let Command::Tokenize(tokenize) = command("ebbtide tokenize -m m --prompt hello") else { panic!("tokenize was asked for") };
    assert_eq!(tokenize.text, PromptSource::Text("hello".to_owned()));
    let Command::Detokenize(detokenize) = command("ebbtide detokenize -m m @ids.txt") else { panic!("detokenize was asked for") };
    assert_eq!(detokenize.tokens, TokenSource::File(PathBuf::from("ids.txt")));
    assert_eq!(refusals("ebbtide detokenize -m m 1 --tokens 2").len(), 1);
    assert!(refusals("ebbtide detokenize -m m 1,y")[0].starts_with("LIST|@FILE: the list: entry 2 is `y`"));
}

#[test]
fn a_piece_longer_than_the_context_is_refused() {
    assert!(checked("ebbtide perplexity -m m --text t --ctx 512", &[]).is_ok());
    let told = refusals("ebbtide perplexity -m m --text t --ctx 256");
    assert!(told[0].starts_with("--piece 512 (default) with --ctx 256"), "{told:?}");
}

#[test]
fn a_flag_without_effect_is_warned_of() {
    let config = checked("ebbtide plan -m m --alias-min-tokens 0 --ctx 256 --prefill 512", &[]).expect("it works");
    assert_eq!(config.warnings.len(), 2, "{:?}", config.warnings);
    let config = checked("ebbtide plan -m m --alias-min-tokens 0 --prefill-head-alias", &[]).expect("it works");
    assert!(config.warnings.is_empty());
    for (line, warnings) in [("plan -m m", 1), ("logits -m m --tokens 1 -o o", 1), ("perplexity -m m --text t", 1), ("run -m m -p x", 0)] {
        let config = checked(&format!("ebbtide {line} --window-hashes h"), &[]).expect("it works");
        assert_eq!(config.warnings.len(), warnings, "{line}: {:?}", config.warnings);
    }
}
