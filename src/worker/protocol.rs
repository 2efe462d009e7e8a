//! What server and worker say to each other: typed messages in frames.
//!
//! ```text
//! frame   = length (u32, little-endian, at most FRAME_BYTES_MAX) + that many bytes of JSON
//! worker  -> Hello, Loading*, (Ready | StartFailed), then for each Generate: Reading*, Wrote*, (Done | Failed); Notice at any time
//! server  -> Generate, Cancel, Stop
//! ```
//! One request runs at a time. Both sides come from one program; the version in [`Hello`] catches a program that was replaced while the
//! server ran. A stream that ends within a frame, or a frame that is none, is an error and never a guess.

use std::io::{ErrorKind, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::engine::sampler::{Logprobs, Sampling};
pub use crate::reply::Delta;
use crate::reply::{AnswerRule, ReasoningStart};
use crate::tokenizer::Json;
use crate::units::TokenId;

/// Version of the messages; both sides must have the same.
pub const PROTOCOL_VERSION: u32 = 2;
/// Most bytes of a frame: a prompt of the longest context there is, written as numbers, has about half of it.
pub const FRAME_BYTES_MAX: usize = 64 << 20;

/// What the server asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// Read a prompt and write on. Only after the last one ended.
    Generate(Box<Generate>),
    /// End that request at its next step; without effect on any other.
    Cancel {
        /// Which.
        id: u64,
    },
    /// End the running request, save what was learned, and exit.
    Stop,
}

/// One answer to write.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Generate {
    /// Chosen by the server, never used twice.
    pub id: u64,
    /// The prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// Tokens to write at most; fewer where the context ends.
    pub tokens_max: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Texts that end the answer and are not part of it; none is empty.
    pub stop_strings: Vec<String>,
    /// Where the model stands when it begins to write.
    pub reasoning: ReasoningStart,
    /// Whether the model thinks where it is not kept from it; else it is not made to.
    pub thinks: bool,
    /// Tokens of thinking at most.
    pub reasoning_tokens_max: Option<usize>,
    /// What the answer has to be like.
    pub rule: Option<AnswerRule>,
    /// The answer ends with its first call.
    pub single_call: bool,
    /// The tools on offer, in OpenAI's form; where there are none, the mark-up of calls is text like any other.
    pub tools: Vec<Json>,
    /// Write on when the model ends its text.
    pub ignore_eos: bool,
    /// Log-probabilities wanted beside each token: of itself and so many best ones.
    pub logprobs: Option<usize>,
}

/// A token whose text has been handed out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WrittenToken {
    /// Its number.
    pub id: TokenId,
    /// How likely it was, where that was asked for.
    pub logprobs: Option<Logprobs>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// The model ended its text.
    Stop,
    /// One of the stop strings, by its number in the request.
    StopString(usize),
    /// As many tokens as asked for, or the context is full.
    Length,
    /// The model called tools.
    ToolCalls,
    /// The server asked for it.
    Cancelled,
}

/// What a request did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// Why it ended.
    pub finish: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of them, those that were not read again.
    pub reused_tokens: usize,
    /// Leading tokens that some known conversation has, too.
    pub common_tokens: usize,
    /// Tokens written.
    pub completion_tokens: usize,
    /// Of them, thoughts.
    pub reasoning_tokens: usize,
    /// How the prompt was read: windows, loan, alias.
    pub way: String,
    /// Why.
    pub way_reason: String,
    /// Tokens of a chunk.
    pub chunk: u32,
    /// Tokens of a block.
    pub block: u32,
    /// Seconds of reading, to the first token.
    pub read_s: f64,
    /// Seconds of writing the others.
    pub write_s: f64,
    /// Expert uses found in a slot.
    pub hits: u64,
    /// Expert uses that crossed the link.
    pub misses: u64,
    /// Drafts offered.
    pub drafts_offered: u64,
    /// Drafts accepted.
    pub drafts_accepted: u64,
    /// Slots lent for the prompt.
    pub slots_lent: u32,
    /// Times the head was brought back.
    pub head_reloads: u64,
    /// Windows captured again.
    pub recaptures: u64,
    /// Bytes of experts over the link.
    pub link_bytes: u64,
    /// The engine behind this request.
    pub engine: EngineState,
}

/// What the engine holds, as of the end of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineState {
    /// Slots in use.
    pub slots: u32,
    /// Lowest free bytes of the device seen in the last request, where the device says.
    pub lowest_free_bytes: Option<u64>,
    /// Host memory of parked conversations.
    pub prefix_bytes: u64,
    /// Conversations parked since the start.
    pub parked: u64,
    /// Conversations resumed since the start.
    pub resumed: u64,
}

/// Whose fault a failed request was, and what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailKind {
    /// The prompt is longer than the context.
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens of the context.
        ctx_tokens: u32,
    },
    /// The request cannot be answered as it is.
    BadRequest,
    /// Something of the engine failed; the next request may go well.
    Engine,
    /// The engine cannot go on; the worker exits.
    Poisoned,
}

/// Bytes of one owner in a phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerShare {
    /// Who.
    pub owner: String,
    /// How much.
    pub bytes: u64,
}

/// The memory plan, as far as people want to see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanSummary {
    /// What may be used.
    pub budget_bytes: u64,
    /// What stays free.
    pub reserve_bytes: u64,
    /// Slots that were planned.
    pub slots: u32,
    /// Bytes of the largest slot.
    pub slot_bytes: u64,
    /// Routed experts of the model.
    pub experts: u32,
    /// Bytes of the output head.
    pub head_bytes: u64,
    /// Longest chunk.
    pub chunk: u32,
    /// Longest block.
    pub block: u32,
    /// The head may be lent.
    pub head_alias: bool,
    /// Owners while tokens are written.
    pub decode: Vec<OwnerShare>,
    /// Owners while a prompt is read.
    pub prefill: Vec<OwnerShare>,
}

/// A worker that can take requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Tokens of context.
    pub ctx_tokens: u32,
    /// Tokens of the vocabulary, rows of the embedding.
    pub n_vocab: u32,
    /// The device, for people.
    pub device: String,
    /// The memory plan.
    pub plan: PlanSummary,
    /// What the engine holds.
    pub engine: EngineState,
}

/// The worker's first words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`] of the worker.
    pub version: u32,
    /// Its process.
    pub pid: u32,
}

/// What the worker tells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromWorker {
    /// First of all.
    Hello(Hello),
    /// The model is being loaded.
    Loading {
        /// Bytes done.
        done: u64,
        /// Of all.
        total: u64,
    },
    /// Requests may come.
    Ready(Box<Ready>),
    /// There will be no engine; the worker exits.
    StartFailed {
        /// Exit code that the program would have.
        exit_status: u8,
        /// Why.
        message: String,
    },
    /// A prompt is being read.
    Reading {
        /// Whose.
        id: u64,
        /// Rows x layers done.
        done: u64,
        /// Of all.
        total: u64,
    },
    /// Something was written.
    Wrote {
        /// Whose.
        id: u64,
        /// In order; may be empty while a text is held back.
        deltas: Vec<Delta>,
        /// The tokens behind what was handed out since the last message.
        tokens: Vec<WrittenToken>,
    },
    /// A request ended well.
    Done {
        /// Which.
        id: u64,
        /// What it did.
        done: Box<Done>,
    },
    /// A request failed.
    Failed {
        /// Which.
        id: u64,
        /// What follows.
        kind: FailKind,
        /// Why.
        message: String,
    },
    /// A line for the log.
    Notice(String),
}

/// A frame that could not be moved.
#[derive(Debug, Error)]
pub enum FrameError {
    /// The pipe failed.
    #[error("the pipe between server and worker failed: {0}")]
    Pipe(#[from] std::io::Error),
    /// The stream ended within a frame.
    #[error("the stream ended within a frame")]
    Torn,
    /// A length past the bound.
    #[error("a frame of {bytes} bytes, at most {FRAME_BYTES_MAX} are allowed")]
    TooLong {
        /// What it says.
        bytes: usize,
    },
    /// Bytes that are no message.
    #[error("a frame that is no message: {0}")]
    NoMessage(#[from] serde_json::Error),
}

/// Writes one message and hands it on at once.
///
/// # Errors
/// [`FrameError`]; after one the stream is of no use.
pub fn write_frame(out: &mut impl Write, message: &impl Serialize) -> Result<(), FrameError> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let bytes = frame.len() - 4;
    let length = u32::try_from(bytes).ok().filter(|_| bytes <= FRAME_BYTES_MAX).ok_or(FrameError::TooLong { bytes })?;
    frame[..4].copy_from_slice(&length.to_le_bytes());
    out.write_all(&frame)?;
    Ok(out.flush()?)
}

/// Reads one message; `None` where the stream ended before one began.
///
/// # Errors
/// [`FrameError`]; after one the stream is of no use.
pub fn read_frame<T: DeserializeOwned>(input: &mut impl Read) -> Result<Option<T>, FrameError> {
    let mut length = [0; 4];
    let mut filled = 0;
    while filled < length.len() {
        match input.read(&mut length[filled..]) {
            Ok(0) if filled == 0 => return Ok(None),
            Ok(0) => return Err(FrameError::Torn),
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    let bytes = u32::from_le_bytes(length) as usize;
    if bytes > FRAME_BYTES_MAX {
        return Err(FrameError::TooLong { bytes });
    }
    // What is taken grows with what comes, not with what the length claims.
    let mut frame = Vec::new();
    input.take(bytes as u64).read_to_end(&mut frame)?;
    if frame.len() < bytes {
        return Err(FrameError::Torn);
    }
    Ok(Some(serde_json::from_slice(&frame)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generate() -> ToWorker {
        ToWorker::Generate(Box::new(Generate {
            id: 7,
            prompt: vec![1, 2, 3],
            tokens_max: usize::MAX,
            sampling: Sampling { seed: u64::MAX, temperature: 0.1, ..Sampling::default() },
            stop_strings: vec!["\n\u{1f638}".to_owned()],
            reasoning: ReasoningStart::Inside,
            thinks: true,
            reasoning_tokens_max: Some(100),
            rule: Some(AnswerRule::JsonSchema("{}".to_owned())),
            single_call: true,
            tools: vec![Json::Object(vec![("z".to_owned(), Json::from("1")), ("a".to_owned(), Json::Null)])],
            ignore_eos: true,
            logprobs: Some(5),
        }))
    }

    #[test]
    fn messages_come_out_as_they_went_in() {
        let mut pipe = Vec::new();
        let messages = [generate(), ToWorker::Cancel { id: 7 }, ToWorker::Stop];
        for message in &messages {
            write_frame(&mut pipe, message).expect("a vector takes all");
        }
        let mut input = pipe.as_slice();
        for message in messages {
            assert_eq!(read_frame(&mut input).expect("a whole frame"), Some(message));
        }
        assert_eq!(read_frame::<ToWorker>(&mut input).expect("a clean end"), None);
    }

    #[test]
    fn log_probabilities_survive_to_the_last_bit() {
        let logprobs = Logprobs { chosen: -0.1, top: vec![(3, -0.1), (4, f32::MIN), (5, -1.0e-30)] };
        let tokens = vec![WrittenToken { id: 3, logprobs: Some(logprobs) }];
        let message = FromWorker::Wrote { id: 1, deltas: vec![Delta::Content("x".to_owned())], tokens };
        let mut pipe = Vec::new();
        write_frame(&mut pipe, &message).expect("a vector takes all");
        assert_eq!(read_frame(&mut pipe.as_slice()).expect("a whole frame"), Some(message));
    }

    #[test]
    fn torn_and_foreign_frames_are_errors() {
        let mut pipe = Vec::new();
        write_frame(&mut pipe, &generate()).expect("a vector takes all");
        for length in [1, 3, 4, 5, pipe.len() - 1] {
            let read = read_frame::<ToWorker>(&mut &pipe[..length]);
            assert!(matches!(read, Err(FrameError::Torn)), "{length}: {read:?}");
        }
        let claims = |bytes: u32| bytes.to_le_bytes().to_vec();
        let huge = read_frame::<ToWorker>(&mut claims(u32::MAX).as_slice());
        assert!(matches!(huge, Err(FrameError::TooLong { .. })), "{huge:?}");
        let lying = read_frame::<ToWorker>(&mut claims(60 << 20).as_slice());
        assert!(matches!(lying, Err(FrameError::Torn)), "{lying:?}");
        let foreign = read_frame::<ToWorker>(&mut [claims(4), b"Stop".to_vec()].concat().as_slice());
        assert!(matches!(foreign, Err(FrameError::NoMessage(_))), "{foreign:?}");
    }
}
