//! One form for the requests of all APIs, and what each of them becomes for the worker.

use std::hash::{BuildHasher, RandomState};

use super::error::ApiError;
use super::fields::Fields;
use super::model::ServedModel;
use crate::engine::sampler::Sampling;
use crate::grammar;
use crate::reply::{AnswerRule, CallForm, ReasoningStart, ToolRule};
pub use crate::reply::{STOP_BYTES_MAX, STOPS_MAX};
use crate::tokenizer::Json;
use crate::units::TokenId;
use crate::worker::protocol::Generate;

/// Most answers to one request.
pub const CHOICES_MAX: usize = 16;
/// Most log-probabilities beside each token.
pub const LOGPROBS_MAX: usize = 20;

/// A conversation to go on with.
#[derive(Clone, Debug, Default)]
pub struct ChatRequest {
    /// Messages as templates take them: `role`, `content` (text) and whatever else they look at.
    pub messages: Vec<Json>,
    /// Tools, each as `{"type": "function", "function": {…}}`.
    pub tools: Vec<Json>,
    /// Whether tools are to be called.
    pub tool_choice: ToolChoice,
    /// Whether several calls may be in one answer.
    pub parallel_tool_calls: bool,
    /// Whether the model is to think; `None`: as its template does by itself.
    pub thinking: Option<bool>,
    /// Tokens of thinking at most.
    pub reasoning_tokens_max: Option<usize>,
    /// Further variables of the template.
    pub template_args: Vec<(String, Json)>,
    /// What the answer's text has to be like. A call that is demanded goes before it.
    pub format: Option<AnswerRule>,
    /// What the answer shall be.
    pub answer: AnswerOptions,
}

/// Whether tools are to be called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As the model likes.
    #[default]
    Auto,
    /// Not at all: the model does not learn of them.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

impl ChatRequest {
    /// The tools that the model learns of.
    #[must_use]
    pub fn offered(&self) -> &[Json] {
        if self.tool_choice == ToolChoice::None { &[] } else { &self.tools }
    }

    /// What the answer has to be like, for a model whose template is `template`.
    ///
    /// # Errors
    /// 400 for a rule that cannot be followed, or a demanded tool that is not on offer.
    pub fn rule(&self, template: &str) -> Result<Option<AnswerRule>, ApiError> {
        let tools = match &self.tool_choice {
            ToolChoice::Auto | ToolChoice::None => {
                if let Some(rule) = &self.format {
                    grammar::check(rule).map_err(|error| ApiError::bad(FORMAT_FIELD, error.to_string()))?;
                }
                return Ok(self.format.clone());
            }
            ToolChoice::Required => self.tools.iter().filter_map(tool_rule).collect(),
            ToolChoice::Named(name) => self.tools.iter().filter_map(tool_rule).filter(|tool| tool.name == *name).collect::<Vec<_>>(),
        };
        if tools.is_empty() {
            return Err(ApiError::bad("tool_choice", "tool_choice: the tool that has to be called is not among `tools`"));
        }
        let parallel = self.parallel_tool_calls && self.tool_choice == ToolChoice::Required;
        let rule = AnswerRule::ToolCall { form: CallForm::of_template(template), tools, parallel };
        grammar::check(&rule).map_err(|error| ApiError::bad("tools", error.to_string()))?;
        Ok(Some(rule))
    }

    /// The worker's orders for all answers. Their ids are given by the queue.
    ///
    /// # Errors
    /// As [`ChatRequest::rule`].
    pub fn generates(&self, model: &ServedModel, prompt: &[TokenId], reasoning: ReasoningStart) -> Result<Vec<Generate>, ApiError> {
        let template = model.template.as_ref().map_or("", |template| template.source());
        let rule = self.rule(template)?;
        let thinks = template.contains(crate::reply::OPEN_TAG);
        let mut generates = self.answer.generates(model, prompt, reasoning, self.offered());
        for generate in &mut generates {
            generate.thinks = thinks;
            generate.single_call = !self.parallel_tool_calls;
            generate.reasoning_tokens_max = self.reasoning_tokens_max;
            generate.rule.clone_from(&rule);
        }
        Ok(generates)
    }
}

/// Where the chat form has the rule for its answer.
pub const FORMAT_FIELD: &str = "response_format";

fn tool_rule(tool: &Json) -> Option<ToolRule> {
    let function = tool.get("function")?;
    let Some(Json::String(name)) = function.get("name") else { return None };
    let schema = function.get("parameters").filter(|schema| matches!(schema, Json::Object(entries) if !entries.is_empty()));
    Some(ToolRule { name: name.clone(), parameters: schema.map(|schema| serde_json::to_string(schema).unwrap_or_default()) })
}

/// What an answer shall be, whatever it answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AnswerOptions {
    /// How tokens are chosen.
    pub sampling: SamplingOverrides,
    /// Tokens to write at most; `None`: to the end of the context.
    pub tokens_max: Option<usize>,
    /// Texts that end an answer.
    pub stop: Vec<String>,
    /// Answers wanted, at least one.
    pub n: usize,
    /// Log-probabilities wanted beside each token.
    pub logprobs: Option<usize>,
    /// Write on when the model ends its text.
    pub ignore_eos: bool,
    /// Who asks, for fairness, where the request says.
    pub client: Option<String>,
}

/// Sampling as far as a request says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOverrides {
    /// See [`Sampling::temperature`].
    pub temperature: Option<f32>,
    /// See [`Sampling::top_p`].
    pub top_p: Option<f32>,
    /// See [`Sampling::top_k`].
    pub top_k: Option<u32>,
    /// See [`Sampling::min_p`].
    pub min_p: Option<f32>,
    /// See [`Sampling::seed`].
    pub seed: Option<u64>,
    /// See [`Sampling::repeat_penalty`].
    pub repeat_penalty: Option<f32>,
    /// See [`Sampling::presence_penalty`].
    pub presence_penalty: Option<f32>,
    /// See [`Sampling::frequency_penalty`].
    pub frequency_penalty: Option<f32>,
    /// See [`Sampling::penalty_last_n`].
    pub penalty_last_n: Option<u32>,
}

/// The least float above 0 that a bound can be.
const ABOVE_ZERO: f32 = f32::MIN_POSITIVE;

impl SamplingOverrides {
    /// Reads the fields that all APIs share.
    ///
    /// # Errors
    /// 400 for a value out of bounds, naming the field.
    pub fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let narrow = |whole: Option<u64>| whole.map(|whole| u32::try_from(whole).unwrap_or(u32::MAX));
        let repeat = match fields.number("repeat_penalty", 0.01, 100.0)? {
            Some(penalty) => Some(penalty),
            None => fields.number("repetition_penalty", 0.01, 100.0)?,
        };
        Ok(Self {
            temperature: fields.number("temperature", 0.0, 100.0)?,
            top_p: fields.number("top_p", ABOVE_ZERO, 1.0)?,
            top_k: narrow(fields.whole("top_k", 0, u64::from(u32::MAX))?),
            min_p: fields.number("min_p", 0.0, 1.0)?,
            seed: seed(fields)?,
            repeat_penalty: repeat,
            presence_penalty: fields.number("presence_penalty", -100.0, 100.0)?,
            frequency_penalty: fields.number("frequency_penalty", -100.0, 100.0)?,
            penalty_last_n: narrow(fields.whole("penalty_last_n", 0, u64::from(u32::MAX))?),
        })
    }

    /// What the sampler is told for the answer number `choice`: answers to one request differ in their seeds.
    #[must_use]
    pub fn over(&self, model: &ServedModel, fresh_seed: u64, choice: usize) -> Sampling {
        let base = &model.sampling;
        let seed = self.seed.or(model.seed).unwrap_or(fresh_seed);
        Sampling {
            temperature: self.temperature.unwrap_or(base.temperature),
            top_k: self.top_k.unwrap_or(base.top_k),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            seed: seed.wrapping_add(choice as u64),
            repeat_penalty: self.repeat_penalty.unwrap_or(base.repeat_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(base.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(base.frequency_penalty),
            penalty_last_n: self.penalty_last_n.unwrap_or(base.penalty_last_n),
        }
    }
}

/// A seed: any whole number of 64 bits, with a sign or without; -1 asks for a new one, as other servers have it.
fn seed(fields: &Fields<'_>) -> Result<Option<u64>, ApiError> {
    match fields.get("seed") {
        Some(Json::Number(number)) if number.as_i64() == Some(-1) => Ok(None),
        Some(Json::Number(number)) if number.is_i64() => Ok(number.as_i64().map(i64::cast_unsigned)),
        _ => fields.whole("seed", 0, u64::MAX),
    }
}

/// Reads `stop`: a text or a list of texts.
///
/// # Errors
/// 400 for an empty text, one that is too long, too many, or anything else.
pub fn read_stops(fields: &Fields<'_>, name: &str) -> Result<Vec<String>, ApiError> {
    let texts = match fields.get(name) {
        Some(Json::String(text)) => vec![text.as_str()],
        _ => {
            let list = fields.list(name, STOPS_MAX)?.iter();
            let texts = list.map(|entry| if let Json::String(text) = entry { Some(text.as_str()) } else { None });
            texts.collect::<Option<Vec<_>>>().ok_or_else(|| fields.refuse(name, "every entry must be a string"))?
        }
    };
    for text in &texts {
        if text.is_empty() {
            return Err(fields.refuse(name, "an empty string would end every answer at once: leave it out"));
        }
        if text.len() > STOP_BYTES_MAX {
            return Err(fields.refuse(name, &format!("a string of {} bytes, at most {STOP_BYTES_MAX} are taken", text.len())));
        }
    }
    Ok(texts.into_iter().map(str::to_owned).collect())
}

/// A seed that nobody can foresee.
#[must_use]
pub fn fresh_seed() -> u64 {
    RandomState::new().hash_one(0)
}

impl AnswerOptions {
    /// The worker's orders for all answers to `prompt`. Their ids are given by the queue.
    #[must_use]
    pub fn generates(&self, model: &ServedModel, prompt: &[TokenId], reasoning: ReasoningStart, tools: &[Json]) -> Vec<Generate> {
        let fresh_seed = fresh_seed();
        let generate = |choice| Generate {
            id: 0,
            prompt: prompt.to_vec(),
            tokens_max: self.tokens_max.unwrap_or(usize::MAX),
            sampling: self.sampling.over(model, fresh_seed, choice),
            stop_strings: self.stop.clone(),
            reasoning,
            thinks: false,
            reasoning_tokens_max: None,
            rule: None,
            single_call: false,
            tools: tools.to_vec(),
            ignore_eos: self.ignore_eos,
            logprobs: self.logprobs,
        };
        (0..self.n.max(1)).map(generate).collect()
    }
}
