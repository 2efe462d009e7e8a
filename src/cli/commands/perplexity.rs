//! `ebbtide perplexity`: how well the model predicts a text.

use super::Opener;
use super::interrupt::Interrupt;
use super::session;
use crate::backend::Backend;
use crate::cli::command::PerplexityConfig;
use crate::cli::config::Config;
use crate::cli::exit::{CommandError, ExitStatus};
use crate::cli::progress::Progress;
use crate::cli::write_stdout;
use crate::engine::sampler::argmax;
use crate::units::TokenId;

/// Negative log-likelihoods, summed.
#[derive(Default)]
struct Loss {
    sum_nats: f64,
    predictions: u64,
}

impl Loss {
    fn add(&mut self, logits: &[f32], target: TokenId) {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
        self.sum_nats += sum.ln() - f64::from(logits[target as usize] - most);
        self.predictions += 1;
    }

    #[allow(clippy::cast_precision_loss, reason = "counts of tokens")]
    fn mean_nats(&self) -> f64 {
        self.sum_nats / self.predictions.max(1) as f64
    }
}

/// What the draft layer guessed.
#[derive(Default)]
struct Drafts {
    loss: Loss,
    compared: u64,
    agreed: u64,
}

impl Drafts {
    /// Compares guesses with the trunk's best tokens at the same places.
    fn compare(&mut self, guesses: &[TokenId], best: &[TokenId]) {
        self.compared += guesses.len().min(best.len()) as u64;
        self.agreed += guesses.iter().zip(best).filter(|(guess, best)| guess == best).count() as u64;
    }

    /// Share of guesses that are the trunk's best token; `None` where there are none.
    #[allow(clippy::cast_precision_loss, reason = "counts of tokens")]
    fn agreement(&self) -> Option<f64> {
        (self.compared > 0).then(|| self.agreed as f64 / self.compared as f64)
    }
}

/// Runs the command: pieces from the start of the text, each read into a fresh sequence; every row
/// predicts the token that follows it in the text. A draft layer predicts the one behind that.
///
/// # Errors
/// As the contract's exit codes say.
pub fn perplexity<B: Backend>(perplexity: &PerplexityConfig, config: &Config, open: Opener<B>) -> Result<(), CommandError> {
    let interrupt = Interrupt::listen();
    let model = session::open_model(&perplexity.model)?;
    let tokenizer = model.tokenizer()?;
    let corpus = session::prompt_tokens(&perplexity.corpus, false, &model, &tokenizer)?;
    let piece_tokens = perplexity.piece_tokens as usize;
    let available = corpus.len() / piece_tokens;
    let pieces = perplexity.pieces_max.map_or(available, |most| available.min(most as usize));
    if pieces == 0 {
        let error = anyhow::anyhow!("the text has {} tokens, a piece {piece_tokens}: give more text or a smaller --piece", corpus.len());
        return Err(CommandError::new(ExitStatus::Input, error));
    }
    let mut engine = session::start(&model, &perplexity.engine, config, open)?;
    let mut progress = Progress::new("pieces", pieces as u64);
    let mut loss = Loss::default();
    let mut drafts = Drafts::default();
    for (number, piece) in corpus.chunks_exact(piece_tokens).take(pieces).enumerate() {
        // A piece's last row predicts the first token of the next one, where there is one.
        let behind = &corpus[number * piece_tokens + 1..];
        let mut targets = behind.iter();
        let mut best = Vec::with_capacity(piece_tokens);
        let mut trunk = |row: &[f32]| {
            best.extend(argmax(row));
            if let Some(&target) = targets.next() {
                loss.add(row, target);
            }
        };
        // The last row's guess would be of a text that goes on as the model has it, not as the text does.
        let mut draft_targets = behind.iter().skip(1).take(piece_tokens - 1);
        let mut guesses = Vec::with_capacity(piece_tokens);
        let mut draft = |row: &[f32]| {
            if let Some(&target) = draft_targets.next() {
                guesses.extend(argmax(row));
                drafts.loss.add(row, target);
            }
        };
        let read = engine.logits_with_drafts(piece, &mut |_| interrupt.control(), &mut trunk, Some(&mut draft))?;
        if read.is_break() {
            return Err(CommandError::new(ExitStatus::Interrupted, anyhow::anyhow!("interrupted after {number} of {pieces} pieces")));
        }
        drafts.compare(&guesses, best.get(1..).unwrap_or_default());
        progress.set(number as u64 + 1);
    }
    progress.finish();
    let mean = loss.mean_nats();
    let draft_loss = (drafts.loss.predictions > 0).then(|| drafts.loss.mean_nats());
    let draft_agreement = drafts.agreement();
    if config.json {
        let report = serde_json::json!({
            "loss": mean, "perplexity": mean.exp(), "draft_loss": draft_loss, "draft_agreement": draft_agreement,
            "pieces": pieces, "piece_tokens": piece_tokens, "predictions": loss.predictions,
        });
        return write_stdout(&format!("{report}\n"));
    }
    write_stdout(&format!(
        "loss {mean:.4} nats a token, perplexity {:.2} ({pieces} pieces of {piece_tokens} tokens, {} predictions)\n",
        mean.exp(),
        loss.predictions
    ))?;
    match (draft_loss, draft_agreement) {
        (Some(loss), Some(agreement)) => {
            write_stdout(&format!("drafts: loss {loss:.4} nats a token, the model's own best token at {:.1} %\n", 100.0 * agreement))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_logits_cost_the_logarithm_of_their_number() {
        let mut loss = Loss::default();
        loss.add(&[3.0; 8], 5);
        assert!((loss.mean_nats() - 8f64.ln()).abs() < 1e-12);
        loss.add(&[0.0, 2f32.ln()], 1);
        assert!((loss.sum_nats - 8f64.ln() - 1.5f64.ln()).abs() < 1e-6);
    }
}
