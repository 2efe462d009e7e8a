//! What a user can set about an engine, as plain checked types.
//!
//! Owns the values, their written forms (`FromStr` and `Display` are inverse) and the bounds that hold for a value on its own.
//! It sits below the engine and the memory plan, which read these types; the command line fills them and checks how they go
//! together. Nothing here opens a file or a device.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

pub use written::{SettingError, WholeNumber};

use crate::units::Bytes;

mod written;

/// Largest context that can be asked for, in tokens.
pub const CONTEXT_TOKENS_MAX: u32 = 4_194_304;
/// Largest chunk and block that can be asked for, in tokens: the longest context that `--ctx auto` chooses.
pub const CHUNK_TOKENS_MAX: u32 = 131_072;
/// Largest amount of memory that can be asked for, in MiB (16 TiB).
pub const MEMORY_MIB_MAX: u64 = 16_777_216;
/// Most VRAM slots that can be asked for.
pub const SLOTS_MAX: u32 = 1_048_576;
/// Most threads that can be asked for.
pub const THREADS_MAX: u32 = 1024;

/// An enum whose values are words: the words are written once, for reading, printing and the message of refusal.
macro_rules! words {
    ($name:ident { $($value:ident = $word:literal),+ $(,)? }) => {
        impl $name {
            /// The words that `FromStr` accepts, as help and messages show them.
            pub const CHOICES: &'static [&'static str] = &[$($word),+];
        }
        impl FromStr for $name {
            type Err = SettingError;
            fn from_str(text: &str) -> Result<Self, SettingError> {
                match text {
                    $($word => Ok(Self::$value),)+
                    _ => Err(SettingError::Choice { value: text.to_owned(), choices: Self::CHOICES.join(", ") }),
                }
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$value => $word),+ })
            }
        }
    };
}

/// Element type of the KV cache; keys and values share one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// 4 bytes an element.
    F32,
    /// 2 bytes an element.
    #[default]
    F16,
    /// 34 bytes for 32 elements.
    Q8_0,
}
words!(KvType { F32 = "f32", F16 = "f16", Q8_0 = "q8_0" });

/// What a product with quantised weights does to its input rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// What the device multiplies fastest: 8 bits, so that the product is one of integers, or on some devices 16-bit floats for prompts.
    #[default]
    Q8,
    /// Prompts in 16-bit floats on any device; windows in 8 bits.
    F16,
    /// Rows stay f32 and weights are widened: slower, closest to the model.
    F32,
}
words!(Activations { Q8 = "q8", F16 = "f16", F32 = "f32" });

/// When the first window after a prompt may start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Refill {
    /// As soon as the head is back; lent slots fill behind it.
    #[default]
    Lazy,
    /// When every lent slot has its expert again.
    Strict,
}
words!(Refill { Lazy = "lazy", Strict = "strict" });

/// How the head's VRAM is lent to the prompt path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadAliasMode {
    /// The head lies in the slab and prompt buffers lie over it: nothing is freed, no address changes.
    #[default]
    Overlay,
    /// The head has an allocation of its own, which is freed for a prompt and made anew behind it.
    Realloc,
}
words!(HeadAliasMode { Overlay = "overlay", Realloc = "realloc" });

/// What the number of slots leaves room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheSizing {
    /// Head, graphs and the reserve, in both phases.
    #[default]
    Exact,
    /// The reserve while a prompt is read, as the founding document sizes it: head and graphs come out of the reserve.
    Seed,
}
words!(CacheSizing { Exact = "exact", Seed = "seed" });

/// The device that holds the slab.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceSetting {
    /// The first card with memory of its own in a build for cards, else the host.
    #[default]
    Auto,
    /// RAM with a byte budget, standing in for a card.
    Host,
    /// A card, by its number, unique number or name.
    Card(String),
}

impl FromStr for DeviceSetting {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        match text {
            "auto" => Ok(Self::Auto),
            "host" => Ok(Self::Host),
            "" => Err(SettingError::Choice {
                value: text.to_owned(),
                choices: "auto, host, or a card's number, unique number or name".to_owned(),
            }),
            card => Ok(Self::Card(card.to_owned())),
        }
    }
}

impl fmt::Display for DeviceSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Host => "host",
            Self::Card(card) => card,
        })
    }
}

/// Tokens of context that the KV cache has room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContextSetting {
    /// The largest that leaves a useful expert cache.
    #[default]
    Auto,
    /// This many.
    Tokens(u32),
}

/// VRAM slots for routed experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertCache {
    /// As many as the budget leaves room for.
    #[default]
    Auto,
    /// This many.
    Slots(u32),
}

/// Tokens of one kernel batch of the prompt path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkSetting {
    /// The planner chooses for each prompt.
    Auto {
        /// It chooses no larger chunk than this.
        max: Option<u32>,
    },
    /// At most this many; chunks of one prompt are levelled.
    Tokens(u32),
}

impl Default for ChunkSetting {
    fn default() -> Self {
        Self::Auto { max: None }
    }
}

/// Tokens that go through all layers in one pass of the prompt path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockSetting {
    /// The planner chooses.
    #[default]
    Auto,
    /// At most this many; blocks of one prompt are levelled.
    Tokens(u32),
    /// Every block is one chunk: the founding document's order, for comparison.
    Chunk,
}

/// Fresh tokens from which a prompt is read with the head's VRAM lent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AliasThreshold {
    /// The planner compares bytes over the link.
    #[default]
    Auto,
    /// From this many on; 0 forces the alias for every prompt of two tokens or more.
    Tokens(u32),
}

/// Prompts that may be read through windows, one token after another, where that moves the least over the link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShortRead {
    /// Those of a few tokens.
    #[default]
    Auto,
    /// Those of at most this many fresh tokens; 0: none.
    Tokens(u32),
}

/// `auto` or a whole number, for types with just these two forms.
macro_rules! auto_or_number {
    ($name:ident :: $number:ident, $unit:literal, $least:expr, $most:expr) => {
        impl FromStr for $name {
            type Err = SettingError;
            fn from_str(text: &str) -> Result<Self, SettingError> {
                if text == "auto" {
                    return Ok(Self::Auto);
                }
                let bounds = WholeNumber { form: "`auto` or a whole number", unit: $unit, least: $least, most: $most as u64 };
                bounds.parse_u32(text).map(Self::$number)
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    Self::Auto => f.write_str("auto"),
                    Self::$number(number) => write!(f, "{number}"),
                }
            }
        }
    };
}
auto_or_number!(ContextSetting::Tokens, "tokens", 1, CONTEXT_TOKENS_MAX);
auto_or_number!(ExpertCache::Slots, "slots", 1, SLOTS_MAX);
auto_or_number!(AliasThreshold::Tokens, "tokens", 0, CONTEXT_TOKENS_MAX);
auto_or_number!(ShortRead::Tokens, "tokens", 0, CONTEXT_TOKENS_MAX);

// Behind the macros, which it uses.
mod drafts;
pub use drafts::{DRAFTS_MAX, DraftSetting, DraftSettings, SpecSetting};

impl FromStr for BlockSetting {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        let bounds = WholeNumber { form: "`auto`, `chunk` or a whole number", unit: "tokens", least: 1, most: u64::from(CHUNK_TOKENS_MAX) };
        match text {
            "auto" => Ok(Self::Auto),
            "chunk" => Ok(Self::Chunk),
            number => bounds.parse_u32(number).map(Self::Tokens),
        }
    }
}

impl fmt::Display for BlockSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Chunk => f.write_str("chunk"),
            Self::Tokens(tokens) => write!(f, "{tokens}"),
        }
    }
}

impl FromStr for ChunkSetting {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        let bounds =
            WholeNumber { form: "`auto`, `auto:MAX` or a whole number", unit: "tokens", least: 1, most: u64::from(CHUNK_TOKENS_MAX) };
        if text == "auto" {
            return Ok(Self::Auto { max: None });
        }
        match text.strip_prefix("auto:") {
            Some(max) => Ok(Self::Auto { max: Some(bounds.parse_u32(max)?) }),
            None => bounds.parse_u32(text).map(Self::Tokens),
        }
    }
}

impl fmt::Display for ChunkSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto { max: None } => f.write_str("auto"),
            Self::Auto { max: Some(max) } => write!(f, "auto:{max}"),
            Self::Tokens(tokens) => write!(f, "{tokens}"),
        }
    }
}

/// All that an engine and its memory plan are told.
///
/// [`EngineSettings::default`] is what the program runs with when nothing is set, apart from `threads`, which the program takes
/// from the machine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    /// VRAM that may be used at most, our own context included; on the host backend the size of the simulated device.
    pub vram: Bytes,
    /// VRAM that stays free; `None`: the smaller of 256 MiB and a sixteenth of the limit.
    pub vram_reserve: Option<Bytes>,
    /// RAM that may be pinned for experts at most; `None`: as much as the system lets us have.
    pub pin: Option<Bytes>,
    /// Room of the KV cache.
    pub ctx: ContextSetting,
    /// Element type of the KV cache.
    pub kv: KvType,
    /// Host memory for parked conversations; zero: every prompt is read from its first token.
    pub prefix_cache: Bytes,
    /// VRAM slots.
    pub expert_cache: ExpertCache,
    /// Where what the cache learns is kept from one start to the next; `None`: nowhere.
    pub expert_profile: Option<PathBuf>,
    /// Chunk of the prompt path.
    pub chunk: ChunkSetting,
    /// Block of the prompt path; one that is no longer than the chunk is read as a single chunk.
    pub block: BlockSetting,
    /// The head's VRAM may be lent to the prompt path.
    pub head_alias: bool,
    /// How it is lent; without effect where `head_alias` is false.
    pub head_alias_mode: HeadAliasMode,
    /// What the number of slots leaves room for.
    pub cache_sizing: CacheSizing,
    /// When it is lent; without effect where `head_alias` is false.
    pub alias_min_tokens: AliasThreshold,
    /// Which prompts may be read through windows; none where `deterministic`.
    pub short_read: ShortRead,
    /// When the first window after a prompt may start.
    pub refill: Refill,
    /// Tokens guessed ahead.
    pub drafts: DraftSettings,
    /// What products do to their input rows.
    pub activations: Activations,
    /// The same tokens come out at any chunk, slot count and loan.
    pub deterministic: bool,
    /// A file for hashes of every window.
    pub window_hashes: Option<PathBuf>,
    /// Threads of the host's kernels, at least one.
    pub threads: u32,
    /// Where the slab lies.
    pub device: DeviceSetting,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            vram: Bytes::mib(8192),
            vram_reserve: None,
            pin: None,
            ctx: ContextSetting::default(),
            kv: KvType::default(),
            prefix_cache: Bytes::ZERO,
            expert_cache: ExpertCache::default(),
            expert_profile: None,
            chunk: ChunkSetting::default(),
            block: BlockSetting::default(),
            head_alias: false,
            head_alias_mode: HeadAliasMode::default(),
            cache_sizing: CacheSizing::default(),
            alias_min_tokens: AliasThreshold::default(),
            short_read: ShortRead::default(),
            refill: Refill::default(),
            drafts: DraftSettings::default(),
            activations: Activations::default(),
            deterministic: false,
            window_hashes: None,
            threads: 1,
            device: DeviceSetting::default(),
        }
    }
}

/// How a token is chosen from logits. `None` leaves it to the model file's `general.sampling.*`, then to the engine's own value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingSettings {
    /// Divisor of the logits; 0 takes the best token.
    pub temperature: Option<f32>,
    /// Candidates kept by rank; 0 keeps all.
    pub top_k: Option<u32>,
    /// Candidates kept by summed probability.
    pub top_p: Option<f32>,
    /// Candidates kept by probability relative to the best.
    pub min_p: Option<f32>,
    /// Start of the random sequence; `None`: a new one each time.
    pub seed: Option<u64>,
    /// Divisor of positive, factor of negative logits of tokens seen before; 1 is off.
    pub repeat_penalty: Option<f32>,
    /// Taken once from the logit of a token seen before; 0 is off.
    pub presence_penalty: Option<f32>,
    /// Taken for each time a token was seen; 0 is off.
    pub frequency_penalty: Option<f32>,
    /// Last tokens that the penalties look at; 0 switches them off.
    pub penalty_last_n: Option<u32>,
}

/// Where the numbers of tokens come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// Written out.
    List(Vec<crate::units::TokenId>),
    /// In a file: text, or little-endian 16-bit where the name ends in `.u16`.
    File(PathBuf),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused<T: FromStr<Err = SettingError> + fmt::Debug>(text: &str) -> String {
        text.parse::<T>().expect_err(text).to_string()
    }

    fn returns<T: FromStr<Err = SettingError> + fmt::Display>(texts: &[&str]) {
        for text in texts {
            assert_eq!(text.parse::<T>().map(|value| value.to_string()).as_deref(), Ok(*text));
        }
    }

    #[test]
    fn every_setting_prints_as_it_is_written() {
        returns::<KvType>(KvType::CHOICES);
        returns::<Activations>(Activations::CHOICES);
        returns::<Refill>(Refill::CHOICES);
        returns::<HeadAliasMode>(HeadAliasMode::CHOICES);
        returns::<CacheSizing>(CacheSizing::CHOICES);
        returns::<DeviceSetting>(&["auto", "host", "0", "GPU-1b2c"]);
        returns::<ContextSetting>(&["auto", "1", "4194304"]);
        returns::<ExpertCache>(&["auto", "1", "40"]);
        returns::<BlockSetting>(&["auto", "chunk", "512"]);
        returns::<AliasThreshold>(&["auto", "0", "32"]);
        returns::<ShortRead>(&["auto", "0", "16"]);
        returns::<ChunkSetting>(&["auto", "auto:512", "1", "131072"]);
    }

    #[test]
    fn a_kv_type_of_another_engine_is_refused_with_the_list() {
        for text in ["q4_0", "k8v4", "foo", "q8_0:foo", "F16", ""] {
            assert_eq!(refused::<KvType>(text), format!("`{text}` is not one of: f32, f16, q8_0"));
        }
    }

    #[test]
    fn a_chunk_outside_its_bounds_is_refused_with_the_bounds() {
        assert_eq!(refused::<ChunkSetting>("0"), "0 is out of bounds: 1 to 131072 tokens");
        assert_eq!(refused::<ChunkSetting>("-1"), "-1 is out of bounds: 1 to 131072 tokens");
        assert_eq!(refused::<ChunkSetting>("99999999"), "99999999 is out of bounds: 1 to 131072 tokens");
        assert_eq!(refused::<ChunkSetting>("auto:0"), "0 is out of bounds: 1 to 131072 tokens");
        let long = "9".repeat(60);
        assert_eq!(refused::<ChunkSetting>(&long), format!("{long} is out of bounds: 1 to 131072 tokens"));
        assert_eq!(refused::<ChunkSetting>("auto:"), "`` is not a number; write `auto`, `auto:MAX` or a whole number");
        assert_eq!(refused::<ContextSetting>("8k"), "`8k` is not a number; write `auto` or a whole number");
    }
}
