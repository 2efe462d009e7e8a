//! Rules of the commands that measure: see [`super::config`] for the rest.
//!
//! What a sweep or an arm sets itself cannot be set beside it. A flag typed for this call is refused then; what environment and file
//! say of all calls gives way with a warning, so that a user's everyday settings do not stand in the way of measuring.

use super::args::{EngineArgs, OutputArgs};
use super::command::{BenchConfig, Command, ReplayConfig};
use super::config::Checker;
use super::lists::List;
use super::measure_args::{BenchArgs, ReplayArgs};
use super::sources::Source;
use crate::bench::frontier::{PLACES_MAX, Sweep};
use crate::bench::material::Material;
use crate::bench::replay::Replay;
use crate::settings::{AliasThreshold, BlockSetting, ChunkSetting, DraftSetting, ExpertCache};

impl Checker<'_> {
    pub(super) fn bench(&mut self, args: BenchArgs) -> (Option<Command>, OutputArgs) {
        let BenchArgs { model, sweep: asked, mut engine } = args;
        self.leave_to_arms(&mut engine, "bench");
        let mut base = self.engine(&engine);
        base.drafts.force_acceptance = asked.force_acceptance.map(f64::from);
        if asked.force_acceptance.is_some() && base.drafts.drafts_max() == 0 {
            let forced = self.shown("force-acceptance");
            let off = self.shown(if base.drafts.source == DraftSetting::Off { "draft" } else { "spec" });
            self.refusals.push(format!("{forced} with {off}: nothing is drafted that could be accepted. Leave one of them out"));
        }
        // Of slots the list stands for budgets, so a plain number stays with the settings.
        let slots = self.swept("slots", "expert-cache", asked.slots, ExpertCache::Auto);
        let contexts = self.swept("contexts", "ctx", asked.contexts, base.ctx);
        let chunks = self.swept("chunks", "prefill", asked.chunks, base.chunk);
        let blocks = self.swept("blocks", "prefill-block", asked.blocks, base.block);
        self.refuse_blocks(&blocks, &chunks);
        let model = self.model(model);
        let is_text = ["text", "tokens"].iter().any(|name| self.settings.said(name).is_some());
        let text = if is_text { self.prompt(&["text", "tokens"], None, asked.text, asked.tokens) } else { None };
        let sweep = Sweep {
            base,
            slots,
            contexts,
            chunks,
            blocks,
            prompts: asked.prompts.map_or_else(Vec::new, |prompts| prompts.0),
            write_tokens: asked.write,
            repeat: asked.repeat,
            material: Material::Random { seed: asked.seed },
        };
        if sweep.places() > PLACES_MAX {
            self.refusals.push(format!(
                "the lists of --slots, --contexts, --chunks, --blocks and --prompts make {} combinations, more than {PLACES_MAX}: shorten \
                 them",
                sweep.places()
            ));
        }
        let html = asked.html;
        (model.map(|model| Command::Bench(BenchConfig { model, sweep, text, html })), engine.output)
    }

    pub(super) fn replay(&mut self, args: ReplayArgs) -> (Option<Command>, OutputArgs) {
        let ReplayArgs { requests, model, trials: asked, mut engine } = args;
        self.leave_to_arms(&mut engine, "replay");
        let base = self.engine(&engine);
        let model = self.model(model);
        let requests = self.needed(requests, "the file of requests: ebbtide replay FILE");
        let replay = Replay { base, arms: asked.arms.0, trials: asked.trials, seed: asked.seed };
        let html = asked.html;
        let config = model.zip(requests).map(|(model, requests)| ReplayConfig { model, requests, replay, html });
        (config.map(Command::Replay), engine.output)
    }

    /// Takes out what arms set themselves, and what is of a single engine.
    fn leave_to_arms(&mut self, args: &mut EngineArgs, command: &str) {
        let EngineArgs { prompt: args, general, .. } = args;
        let is_chunk = args.prefill_block == BlockSetting::Chunk;
        let set = [
            ("prefill-head-alias", args.prefill_head_alias, "the arms with the alias and those without are compared"),
            ("alias-min-tokens", args.alias_min_tokens != AliasThreshold::Auto, "the arms say when the head is lent"),
            ("window-hashes", general.window_hashes.is_some(), "each of many engines would write the file anew"),
            ("prefill-block", is_chunk, "the arms `default` and `alias-chunk` read so, and the others are compared with them"),
        ];
        for (name, is_set, why) in set {
            let Some(setting) = self.settings.said(name).filter(|_| is_set) else { continue };
            if setting.source == Source::Flag {
                self.refusals.push(format!("{setting} with {command}: {why}. Leave the flag out"));
            } else {
                self.warnings.push(format!("{setting} changes nothing here: {why}"));
            }
        }
        general.window_hashes = None;
        args.prefill_head_alias = false;
        args.alias_min_tokens = AliasThreshold::Auto;
        if is_chunk {
            args.prefill_block = BlockSetting::Auto;
        }
    }

    /// What is swept: the list, or the one value where that is the stronger of the two. Two of one place clash.
    fn swept<T>(&mut self, list_name: &str, name: &str, list: Option<List<T>>, value: T) -> Vec<T> {
        let settings = self.settings;
        let Some(List(list)) = list else { return vec![value] };
        let (Some(of_list), Some(single)) = (settings.said(list_name), settings.said(name)) else { return list };
        if single.source.wins_over(&of_list.source) {
            return vec![value];
        }
        if !of_list.source.wins_over(&single.source) {
            self.refusals.push(format!("{of_list} with {single}: the sweep sets what --{name} sets. Leave one of them out"));
        }
        list
    }

    fn refuse_blocks(&mut self, blocks: &[BlockSetting], chunks: &[ChunkSetting]) {
        if blocks.contains(&BlockSetting::Chunk) {
            let blocks = self.shown("blocks");
            self.refusals.push(format!("{blocks}: the arms `default` and `alias-chunk` read in blocks of one chunk. Leave `chunk` out"));
        }
        let tokens = |block: &BlockSetting| if let BlockSetting::Tokens(tokens) = block { Some(*tokens) } else { None };
        let shortest = blocks.iter().filter_map(tokens).min();
        let tokens = |chunk: &ChunkSetting| if let ChunkSetting::Tokens(tokens) = chunk { Some(*tokens) } else { None };
        let longest = chunks.iter().filter_map(tokens).max();
        // With a list of neither the two flags are compared as for every command.
        let is_list = ["blocks", "chunks"].iter().any(|name| self.settings.said(name).is_some());
        if let (Some(block), Some(chunk), true) = (shortest, longest, is_list)
            && block < chunk
        {
            let shown = |list: &str, single: &str| self.shown(if self.settings.said(list).is_some() { list } else { single });
            let (blocks, chunks) = (shown("blocks", "prefill-block"), shown("chunks", "prefill"));
            self.refusals.push(format!(
                "{blocks} with {chunks}: a block holds whole chunks, and {block} is less than {chunk}. Leave one of these numbers out"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::bench::Arm;
    use crate::cli::command::PromptSource;
    use crate::cli::config::tests::checked;
    use crate::settings::ContextSetting;

    fn sweep(line: &str, environment: &[(&str, &str)]) -> (Sweep, Vec<String>) {
        let config = checked(line, environment).expect(line);
        let Command::Bench(bench) = config.command else { panic!("a bench was asked for") };
        (bench.sweep, config.warnings)
    }

    #[test]
    fn a_sweep_without_lists_is_the_one_point_of_the_settings() {
        let (sweep, warnings) = sweep("ebbtide bench -m m --ctx 4096 --expert-cache 40 --prefill 64 --prefill-block 128", &[]);
        assert_eq!(sweep.contexts, [ContextSetting::Tokens(4096)]);
        assert_eq!((sweep.chunks, sweep.blocks), (vec![ChunkSetting::Tokens(64)], vec![BlockSetting::Tokens(128)]));
        assert_eq!((sweep.slots, sweep.base.expert_cache), (vec![ExpertCache::Auto], ExpertCache::Slots(40)));
        assert!(sweep.prompts.is_empty() && warnings.is_empty());
        assert_eq!((sweep.write_tokens, sweep.repeat, sweep.material), (32, 3, Material::Random { seed: 1 }));
    }

    #[test]
    fn lists_are_swept_and_a_text_is_read() {
        let line = "ebbtide bench -m m --slots 8,auto --prompts 100,200 --chunks auto:64,32 --blocks auto,512 --contexts 1024 --text t";
        let config = checked(line, &[]).expect(line);
        let Command::Bench(bench) = config.command else { panic!("a bench was asked for") };
        assert_eq!(bench.sweep.slots, [ExpertCache::Slots(8), ExpertCache::Auto]);
        assert_eq!(bench.sweep.prompts, [100, 200]);
        assert_eq!(bench.sweep.places(), 16);
        assert_eq!(bench.text, Some(PromptSource::File(PathBuf::from("t"))));
    }

    #[test]
    fn what_sweep_and_arms_set_clashes_by_name_all_in_one_message() {
        let line = "ebbtide bench --slots 8 --expert-cache 9 --contexts 512 --ctx 1024 --chunks 64 --prefill 32 --blocks 32,chunk \
            --prefill-block chunk --prefill-head-alias --alias-min-tokens 5 --window-hashes w --text a --tokens 1,2";
        let told = checked(line, &[]).expect_err(line).0;
        let starts = [
            "--prefill-head-alias with bench: ",
            "--alias-min-tokens 5 with bench: ",
            "--prefill-block chunk with bench: ",
            "--window-hashes w with bench: ",
            "--slots 8 with --expert-cache 9: ",
            "--contexts 512 with --ctx 1024: ",
            "--chunks 64 with --prefill 32: ",
            "--blocks 32,chunk with --prefill-block chunk: ",
            "--blocks 32,chunk: the arms",
            "--blocks 32,chunk with --chunks 64: a block holds whole chunks, and 32 is less than 64",
            "missing: the model: ",
            "--text a with --tokens 1,2: ",
        ];
        for start in starts {
            assert!(told.iter().any(|refusal| refusal.starts_with(start)), "{start} in {told:#?}");
        }
        assert_eq!(told.len(), starts.len(), "{told:#?}");
    }

    #[test]
    fn everyday_settings_give_way_to_what_is_typed() {
        let everyday = [("EBBTIDE_PREFILL_HEAD_ALIAS", "1"), ("EBBTIDE_CTX", "2048"), ("EBBTIDE_EXPERT_CACHE", "9")];
        let (sweep, warnings) = sweep("ebbtide bench -m m --contexts 512,1024 --slots 4,5", &everyday);
        assert_eq!(sweep.contexts, [ContextSetting::Tokens(512), ContextSetting::Tokens(1024)]);
        assert_eq!(sweep.slots.len(), 2);
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].starts_with("--prefill-head-alias 1 (from EBBTIDE_PREFILL_HEAD_ALIAS) changes nothing here"), "{warnings:?}");
        assert!(!sweep.base.head_alias);
        let (typed, _) = self::sweep("ebbtide bench -m m --ctx 4096", &[("EBBTIDE_CONTEXTS", "512,1024")]);
        assert_eq!(typed.contexts, [ContextSetting::Tokens(4096)]);
    }

    #[test]
    fn acceptance_is_forced_where_something_is_drafted() {
        let forced = sweep("ebbtide bench -m m --force-acceptance 0.5 --draft lookup", &[]).0.base.drafts.force_acceptance;
        assert_eq!((forced, sweep("ebbtide bench -m m", &[]).0.base.drafts.force_acceptance), (Some(0.5), None));
        for (off, shown) in [("--draft off", "--draft off"), ("--spec 0", "--spec 0")] {
            let told = checked(&format!("ebbtide bench -m m --force-acceptance 0.5 {off}"), &[]).expect_err(off).0;
            assert_eq!(
                told,
                [format!("--force-acceptance 0.5 with {shown}: nothing is drafted that could be accepted. Leave one of them out")]
            );
        }
    }

    #[test]
    fn too_many_combinations_are_refused_with_their_number() {
        let numbers = |count: u32| (1..=count).map(|number| number.to_string()).collect::<Vec<_>>().join(",");
        let line = format!("ebbtide bench -m m --prompts {} --slots {} --chunks 1,2", numbers(64), numbers(33));
        assert!(checked(&line, &[]).expect_err("4,224").0[0].contains("make 4224 combinations, more than 4096"));
    }

    #[test]
    fn a_replay_has_its_arms_and_its_file() {
        let config = checked("ebbtide replay f.jsonl -m m --arms auto,alias-chunk --trials 2 --seed 9 --prefill-block 512", &[]);
        let Command::Replay(replay) = config.expect("sound").command else { panic!("a replay was asked for") };
        assert_eq!(replay.requests, PathBuf::from("f.jsonl"));
        assert_eq!(replay.replay.arms, [Arm::Auto, Arm::AliasChunk]);
        assert_eq!((replay.replay.trials, replay.replay.seed, replay.replay.base.block), (2, 9, BlockSetting::Tokens(512)));
        let told = checked("ebbtide replay --prefill-head-alias", &[]).expect_err("nothing is there").0;
        assert_eq!(told.len(), 3, "{told:?}");
        assert!(told[0].starts_with("--prefill-head-alias with replay: ") && told[2].starts_with("missing: the file of requests"));
    }
}
