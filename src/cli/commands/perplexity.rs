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

/// Runs the command: pieces from the start of the text, each read into a fresh sequence; every row
/// predicts the token that follows it in the text.
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
    for (number, piece) in corpus.chunks_exact(piece_tokens).take(pieces).enumerate() {
        // A piece's last row predicts the first token of the next one, where there is one.
        let mut targets = corpus[number * piece_tokens + 1..].iter();
        let read = engine.logits(piece, &mut |_| interrupt.control(), &mut |row| {
            if let Some(&target) = targets.next() {
                loss.add(row, target);
            }
        })?;
        if read.is_break() {
            return Err(CommandError::new(ExitStatus::Interrupted, anyhow::anyhow!("interrupted after {number} of {pieces} pieces")));
        }
        progress.set(number as u64 + 1);
    }
    progress.finish();
    let mean = loss.mean_nats();
    if config.json {
        let report = serde_json::json!({
            "loss": mean, "perplexity": mean.exp(), "draft_loss": null, "draft_agreement": null,
            "pieces": pieces, "piece_tokens": piece_tokens, "predictions": loss.predictions,
        });
        return write_stdout(&format!("{report}\n"));
    }
    write_stdout(&format!(
        "loss {mean:.4} nats a token, perplexity {:.2} ({pieces} pieces of {piece_tokens} tokens, {} predictions)\n",
        mean.exp(),
        loss.predictions
    ))
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
