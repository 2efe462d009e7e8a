//! What a report says of the surroundings of its figures: absolute speeds mean nothing without them.

use serde::Serialize;

use super::Ended;
use crate::model::Model;
use crate::settings::EngineSettings;
use crate::units::Bytes;

/// Surroundings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct About {
    /// Of this program.
    pub version: &'static str,
    /// The model's name.
    pub model: String,
    /// Bytes of all its routed experts.
    pub expert_bytes: Bytes,
    /// Routed experts of all layers.
    pub n_experts: u32,
    /// The device asked for.
    pub device: String,
    /// Threads of the host's kernels.
    pub threads: u32,
    /// The limit of VRAM.
    pub vram_bytes: Bytes,
    /// Type of the KV cache.
    pub kv: String,
    /// Input of products with quantised weights.
    pub activations: String,
    /// Who drafts.
    pub draft: String,
    /// Most drafts of a window.
    pub drafts_max: usize,
    /// Probability with which every draft was taken, whatever the model said; `None`: as the model said.
    pub force_acceptance: Option<f64>,
}

impl About {
    /// Of a model under settings.
    #[must_use]
    pub fn new(model: &Model, settings: &EngineSettings) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            model: model.name(),
            expert_bytes: model.weights.expert_bytes(),
            n_experts: model.shape.n_routed_experts(),
            device: settings.device.to_string(),
            threads: settings.threads,
            vram_bytes: settings.vram,
            kv: settings.kv.to_string(),
            activations: settings.activations.to_string(),
            draft: settings.drafts.source.to_string(),
            drafts_max: settings.drafts.drafts_max(),
            force_acceptance: settings.drafts.force_acceptance,
        }
    }

    /// Names and values, for pages.
    #[must_use]
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let forced =
            self.force_acceptance.map_or_else(String::new, |forced| format!("; acceptance forced to {forced}, the text means nothing"));
        vec![
            ("model", self.model.clone()),
            ("routed experts", format!("{}, {}", self.n_experts, self.expert_bytes)),
            ("device", format!("{}, at most {}, {} threads", self.device, self.vram_bytes, self.threads)),
            ("arithmetic", format!("KV cache {}, activations {}", self.kv, self.activations)),
            ("drafts", format!("{}, at most {} a window{forced}", self.draft, self.drafts_max)),
            ("program", format!("ebbtide {}", self.version)),
        ]
    }
}

/// The end as JSON has it.
#[must_use]
pub const fn ended(ended: &Ended) -> &'static str {
    match ended {
        Ended::Done => "done",
        Ended::Interrupted => "interrupted",
        Ended::Failed(_) => "failed",
    }
}

/// What there is to say of an end that came early.
#[must_use]
pub fn early_end(ended: &Ended) -> Option<String> {
    match ended {
        Ended::Done => None,
        Ended::Interrupted => Some("Interrupted: the figures are those measured until then.".to_owned()),
        Ended::Failed(error) => Some(format!("Ended early, the figures are those measured until then: {error}")),
    }
}
