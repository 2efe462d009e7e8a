//! Settings with a meaning: what one call of the program shall do, checked as a whole.
//!
//! Owns the rules about settings that do not go together and the list of what this version does not carry out yet
//! ([`NOT_YET`]): nothing that was asked for is silently left out. All refusals of a call come in one message, before anything is
//! loaded; each names what clashes, why, and the way out. The results are plain data without a trace of the parser.

use std::path::PathBuf;

use thiserror::Error;

use super::args::{CommandArgs, EngineArgs, ModelArgs, OutputArgs, SamplingArgs};
use super::command::{
    Command, DemoConfig, DetokenizeConfig, DoctorConfig, LogitsConfig, PerplexityConfig, PlanConfig, PromptSource, RunConfig,
    TokenizeConfig,
};
use super::exit::{Classified, ExitStatus};
use super::not_yet::NOT_YET;
use super::sources::{Resolved, Setting, Settings, Source};
use super::{refusals, tokens};
use crate::settings::{
    AliasThreshold, BlockSetting, CacheSizing, ChunkSetting, ContextSetting, DeviceSetting, EngineSettings, HeadAliasMode, MEMORY_MIB_MAX,
    SamplingSettings, TokenSource,
};
use crate::units::Bytes;

/// A checked call.
#[derive(Debug)]
pub struct Config {
    /// What to do.
    pub command: Command,
    /// One JSON object on stdout, instead of text.
    pub json: bool,
    /// More on stderr.
    pub verbose: bool,
    /// What has no effect, or looks like a mistake; each ends in what to do.
    pub warnings: Vec<String>,
    /// The same as text, with the place of each value.
    pub settings: Settings,
    /// The configuration file that was read.
    pub file: Option<PathBuf>,
}

/// Settings that cannot be carried out, all of one call.
#[derive(Debug, PartialEq, Eq, Error)]
#[error("{}", .0.join("\n"))]
pub struct Refused(pub Vec<String>);

impl Classified for Refused {
    fn exit_status(&self) -> ExitStatus {
        ExitStatus::Usage
    }
}

/// Turns what was said into what is to be done.
///
/// # Errors
/// With every refusal at once.
pub fn check(resolved: Resolved) -> Result<Config, Refused> {
    let Resolved { cli, mut settings, file, warnings } = resolved;
    settings.assume("threads", processors());
    let mut checker = Checker { settings: &settings, refusals: Vec::new(), warnings };
    checker.refuse_what_is_to_come();
    let (command, output) = checker.command(cli.command);
    let Checker { refusals, warnings, .. } = checker;
    match command {
        Some(command) if refusals.is_empty() => {
            Ok(Config { command, json: output.json, verbose: output.verbose, warnings, settings, file })
        }
        _ => Err(Refused(refusals)),
    }
}

/// Collects refusals. A part that cannot be made is `None`, and then a refusal says why.
pub(super) struct Checker<'a> {
    pub(super) settings: &'a Settings,
    pub(super) refusals: Vec<String>,
    pub(super) warnings: Vec<String>,
}

impl Checker<'_> {
    /// The setting as a message shows it, with its value and place.
    pub(super) fn shown(&self, name: &str) -> String {
        self.settings.get(name).map_or_else(|| format!("--{name}"), Setting::to_string)
    }

    fn refuse_what_is_to_come(&mut self) {
        for later in NOT_YET {
            let Some(setting) = self.settings.get(later.flag) else { continue };
            let accepted = |value: &str| later.accepts.contains(&value);
            if setting.value.as_deref().is_some_and(|value| !value.to_str().is_some_and(accepted)) {
                // Other engines demand some of these flags beside the alias, so say that ours does not.
                let alias = self.settings.get("prefill-head-alias").is_some_and(|alias| alias.source != Source::Default);
                let with_alias = if alias { ". --prefill-head-alias works without it" } else { "" };
                self.refusals.push(format!("{setting} is not in this version: {}{with_alias}", later.reason));
            }
        }
    }

    fn command(&mut self, args: CommandArgs) -> (Option<Command>, OutputArgs) {
        match args {
            CommandArgs::Demo(args) => {
                let engine = self.engine(&args.engine);
                (Some(Command::Demo(DemoConfig { engine, sampling: sampling(&args.sampling) })), args.engine.output)
            }
            CommandArgs::Run(args) => {
                let engine = self.engine(&args.engine);
                let model = self.model(args.model);
                let text = args.text;
                let prompt = self.prompt(&["prompt", "prompt-file", "tokens"], text.prompt, text.prompt_file, text.tokens);
                if text.chat && matches!(prompt, Some(PromptSource::Tokens(_))) {
                    let (chat, tokens) = (self.shown("chat"), self.shown("tokens"));
                    self.refusals.push(format!(
                        "{chat} with {tokens}: the chat template makes text, and token numbers are past that. Leave one of them out"
                    ));
                }
                let config = model.zip(prompt).map(|(model, prompt)| RunConfig {
                    model,
                    prompt,
                    tokens_max: text.max_tokens.map(narrowed),
                    ignore_eos: text.ignore_eos,
                    chat: text.chat,
                    engine,
                    sampling: sampling(&args.sampling),
                });
                (config.map(Command::Run), args.engine.output)
            }
            CommandArgs::Plan(args) => {
                self.warn_of_no_windows(&args.engine, "plan");
                let engine = self.engine(&args.engine);
                (self.model(args.model).map(|model| Command::Plan(PlanConfig { model, engine })), args.engine.output)
            }
            CommandArgs::Logits(args) => {
                self.refuse_alias(&args.engine, "logits");
                self.warn_of_no_windows(&args.engine, "logits");
                let engine = self.engine(&args.engine);
                let model = self.model(args.model);
                let tokens = self.tokens(&["tokens"], args.tokens);
                let output = self.needed(args.output, "the file to write: -o FILE.npy");
                if let Some(mtp_output) = args.mtp_out.as_ref().filter(|&mtp_output| output.as_ref() == Some(mtp_output)) {
                    let shown = mtp_output.display();
                    self.refusals.push(format!("--mtp-out {shown} with -o {shown}: both would be one file. Name another one"));
                }
                let mtp_output = args.mtp_out;
                let config = model.zip(tokens).zip(output);
                let config = config.map(|((model, tokens), output)| LogitsConfig { model, tokens, output, mtp_output, engine });
                (config.map(Command::Logits), args.engine.output)
            }
            CommandArgs::Perplexity(args) => {
                self.refuse_alias(&args.engine, "perplexity");
                self.warn_of_no_windows(&args.engine, "perplexity");
                let engine = self.engine(&args.engine);
                let piece_tokens = narrowed(args.piece);
                self.refuse_long_piece(piece_tokens, engine.ctx);
                let model = self.model(args.model);
                let corpus = self.prompt(&["text", "tokens"], None, args.text, args.tokens);
                let pieces_max = args.pieces.map(narrowed);
                let config = model.zip(corpus);
                let config = config.map(|(model, corpus)| PerplexityConfig { model, corpus, piece_tokens, pieces_max, engine });
                (config.map(Command::Perplexity), args.engine.output)
            }
            CommandArgs::Tokenize(args) => {
                let model = self.model(args.model);
                let text = self.prompt(&["TEXT", "prompt", "prompt-file"], args.input.or(args.prompt), args.prompt_file, None);
                (model.zip(text).map(|(model, text)| Command::Tokenize(TokenizeConfig { model, text })), args.output)
            }
            CommandArgs::Detokenize(args) => {
                let model = self.model(args.model);
                let tokens = self.tokens(&["LIST|@FILE", "tokens"], args.input.or(args.tokens));
                (model.zip(tokens).map(|(model, tokens)| Command::Detokenize(DetokenizeConfig { model, tokens })), args.output)
            }
            CommandArgs::Serve(args) => self.serve(*args),
            CommandArgs::Worker(args) => self.worker(*args),
            CommandArgs::Bench(args) => self.bench(*args),
            CommandArgs::Replay(args) => self.replay(*args),
            CommandArgs::Devices(args) => (Some(Command::Devices), args.output),
            CommandArgs::Doctor(args) => {
                self.warn_of_no_windows(&args.engine, "doctor");
                let engine = self.engine(&args.engine);
                (Some(Command::Doctor(DoctorConfig { model: args.model.model, engine })), args.engine.output)
            }
            CommandArgs::Config(args) => {
                self.engine(&args.engine);
                (Some(Command::ShowConfig), args.engine.output)
            }
        }
    }

    pub(super) fn needed<T>(&mut self, value: Option<T>, what: &str) -> Option<T> {
        if value.is_none() {
            self.refusals.push(format!("missing: {what}"));
        }
        value
    }

    pub(super) fn model(&mut self, args: ModelArgs) -> Option<PathBuf> {
        self.needed(args.model, "the model: -m FILE, EBBTIDE_MODEL, or `model` in the configuration file")
    }

    /// The one of several settings that holds. A flag typed for this call goes before what a file says of all calls; two of one
    /// place clash.
    fn choose(&mut self, names: &[&str]) -> Option<&Setting> {
        let settings = self.settings;
        let said: Vec<&Setting> = names.iter().filter_map(|name| settings.said(name)).collect();
        let best = said.iter().copied().reduce(|best, other| if other.source.wins_over(&best.source) { other } else { best });
        let Some(best) = best else {
            let all = names.iter().map(|name| self.shown(name).replace(" (default)", "")).collect::<Vec<_>>().join(" or ");
            self.refusals.push(format!("missing: one of {all}"));
            return None;
        };
        let rival = said.into_iter().find(|other| other.name != best.name && !best.source.wins_over(&other.source));
        if let Some(rival) = rival {
            self.refusals.push(format!("{best} with {rival}: both say what to read. Leave one of them out"));
            return None;
        }
        Some(best)
    }

    pub(super) fn prompt(
        &mut self,
        names: &[&str],
        text: Option<String>,
        file: Option<PathBuf>,
        tokens: Option<String>,
    ) -> Option<PromptSource> {
        let chosen = self.choose(names)?.name.clone();
        match chosen.as_str() {
            "tokens" => self.parsed_tokens("tokens", &tokens?).map(PromptSource::Tokens),
            "text" | "prompt-file" => file.map(PromptSource::File),
            _ => text.map(PromptSource::Text),
        }
    }

    fn tokens(&mut self, names: &[&str], written: Option<String>) -> Option<TokenSource> {
        let chosen = self.choose(names)?.name.clone();
        self.parsed_tokens(&chosen, &written?)
    }

    fn parsed_tokens(&mut self, name: &str, written: &str) -> Option<TokenSource> {
        match tokens::parse_source(written) {
            Ok(source) => Some(source),
            Err(error) => {
                let flag = if self.settings.get(name).is_some_and(Setting::is_flag) { "--" } else { "" };
                self.refusals.push(format!("{flag}{name}: {error}"));
                None
            }
        }
    }

    fn refuse_alias(&mut self, args: &EngineArgs, command: &str) {
        if args.prompt.prefill_head_alias {
            let alias = self.shown("prefill-head-alias");
            self.refusals.push(refusals::ALIAS_WITH_ALL_LOGITS.message(&format!("{alias} with {command}")));
        }
    }

    fn refuse_long_piece(&mut self, piece_tokens: u32, ctx: ContextSetting) {
        if let ContextSetting::Tokens(tokens) = ctx
            && piece_tokens > tokens
        {
            let (piece, ctx) = (self.shown("piece"), self.shown("ctx"));
            self.refusals.push(format!("{piece} with {ctx}: a piece is longer than the context. Lower --piece or raise --ctx"));
        }
    }

    pub(super) fn engine(&mut self, args: &EngineArgs) -> EngineSettings {
        self.refuse_block_below_chunk(args);
        self.refuse_large_reserve(args);
        self.refuse_modes_without_alias(args);
        self.warn_of_no_effect(args);
        let EngineArgs { memory, prompt, draft, general, .. } = args;
        EngineSettings {
            vram: self.vram(memory.vram_mib, &general.device),
            vram_reserve: memory.vram_reserve_mib.map(Bytes::mib),
            pin: memory.pin_mib.map(Bytes::mib),
            ctx: memory.ctx,
            kv: memory.kv,
            prefix_cache: Bytes::mib(memory.prefix_cache_mib),
            expert_cache: memory.expert_cache,
            expert_profile: memory.expert_profile.clone().filter(|path| path.as_os_str() != "off"),
            chunk: prompt.prefill,
            block: prompt.prefill_block,
            head_alias: prompt.prefill_head_alias,
            head_alias_mode: prompt.head_alias_mode,
            cache_sizing: memory.cache_sizing,
            alias_min_tokens: prompt.alias_min_tokens,
            short_read: prompt.short_read,
            refill: prompt.refill,
            drafts: self.drafts(draft),
            activations: general.activations,
            deterministic: general.deterministic,
            window_hashes: general.window_hashes.clone(),
            threads: general.threads.map_or_else(processors, narrowed),
            device: general.device.clone(),
        }
    }

    /// A card is used as far as it goes, unless a limit was set; the default is the size of a simulated device.
    fn vram(&mut self, vram_mib: u64, device: &DeviceSetting) -> Bytes {
        match device {
            DeviceSetting::Card(card) if !crate::backends::RUNS_ON_CARDS => {
                self.refusals
                    .push(format!("--device {card}: this build has no cards. Build it with --features cuda, or write --device host"));
                Bytes::mib(vram_mib)
            }
            DeviceSetting::Auto | DeviceSetting::Card(_) if crate::backends::RUNS_ON_CARDS && self.settings.said("vram-mib").is_none() => {
                Bytes::mib(MEMORY_MIB_MAX)
            }
            _ => Bytes::mib(vram_mib),
        }
    }

    fn refuse_block_below_chunk(&mut self, args: &EngineArgs) {
        let (BlockSetting::Tokens(block), ChunkSetting::Tokens(chunk)) = (args.prompt.prefill_block, args.prompt.prefill) else { return };
        if block < chunk {
            let (block_shown, chunk_shown) = (self.shown("prefill-block"), self.shown("prefill"));
            self.refusals.push(refusals::BLOCK_BELOW_CHUNK.message(&format!("{block_shown} with {chunk_shown}")));
        }
    }

    fn refuse_modes_without_alias(&mut self, args: &EngineArgs) {
        if args.prompt.prefill_head_alias {
            return;
        }
        if args.prompt.head_alias_mode == HeadAliasMode::Realloc {
            let mode = self.shown("head-alias-mode");
            self.refusals.push(refusals::MODE_WITHOUT_ALIAS.message(&format!("{mode} without --prefill-head-alias")));
        }
        if args.memory.cache_sizing == CacheSizing::Seed {
            let sizing = self.shown("cache-sizing");
            self.refusals.push(refusals::SIZING_WITHOUT_ALIAS.message(&format!("{sizing} without --prefill-head-alias")));
        }
    }

    fn refuse_large_reserve(&mut self, args: &EngineArgs) {
        if args.memory.vram_reserve_mib.is_some_and(|reserve| reserve >= args.memory.vram_mib) {
            let (reserve, vram) = (self.shown("vram-reserve-mib"), self.shown("vram-mib"));
            self.refusals.push(refusals::RESERVE_IS_ALL.message(&format!("{reserve} with {vram}")));
        }
    }

    fn warn_of_no_windows(&mut self, args: &EngineArgs, command: &str) {
        if args.general.window_hashes.is_some() {
            let hashes = self.shown("window-hashes");
            self.warnings.push(format!("{hashes} has no effect with {command}, which runs no windows: leave it out"));
        }
    }

    fn warn_of_no_effect(&mut self, args: &EngineArgs) {
        if args.prompt.alias_min_tokens != AliasThreshold::Auto && !args.prompt.prefill_head_alias {
            let threshold = self.shown("alias-min-tokens");
            self.warnings.push(format!("{threshold} has no effect without --prefill-head-alias: add that, or leave this out"));
        }
        if let (ChunkSetting::Tokens(chunk), ContextSetting::Tokens(tokens)) = (args.prompt.prefill, args.memory.ctx)
            && chunk > tokens
        {
            let (chunk, ctx) = (self.shown("prefill"), self.shown("ctx"));
            self.warnings.push(format!("{chunk} is more than {ctx}: no prompt fills such a chunk. Lower --prefill"));
        }
    }
}

/// One thread for each processor that this process may use.
fn processors() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX))
}

fn narrowed(number: u64) -> u32 {
    u32::try_from(number).expect("the flag's bounds fit 32 bits")
}

pub(super) fn sampling(args: &SamplingArgs) -> SamplingSettings {
    SamplingSettings {
        temperature: args.temp,
        top_k: args.top_k.map(narrowed),
        top_p: args.top_p,
        min_p: args.min_p,
        seed: args.seed,
        repeat_penalty: args.repeat_penalty,
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        penalty_last_n: args.penalty_last_n.map(narrowed),
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
pub(super) mod tests;
