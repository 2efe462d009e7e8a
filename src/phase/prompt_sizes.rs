//! Which sizes the prompt path may be given: tokens of a chunk and of a block, experts in flight.
//!
//! A block that is one chunk is the founding document's order. A longer block keeps the chunk short, since a chunk's scratch costs
//! several times what a token of the block costs, and the matrix products are efficient from a few hundred rows on.

use crate::model::layout::{CHUNK_RING_SLOTS, PromptSize};
use crate::settings::{BlockSetting, ChunkSetting, EngineSettings};

/// Largest chunk that is chosen unasked for a block of one chunk.
const CHUNK_AUTO_MAX: u32 = 8192;
/// Experts in flight where a block is one chunk, best first: they keep the link busy during the mixer half of the next layer.
const CHUNK_RINGS: [u32; 8] = [80, 72, 64, 56, 48, 40, 32, CHUNK_RING_SLOTS];
/// Chunks of longer blocks with the experts in flight that go with them, best first: long enough for the products and for the link,
/// then ever smaller for ever tighter arenas.
const BLOCK_FORMS: [(u32, u32); 8] = [(4096, 32), (2048, 32), (1024, 32), (512, 32), (512, 16), (256, 16), (128, 8), (64, 4)];

/// What settings and context allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeLimits {
    /// Longest chunk.
    pub chunk_max: u32,
    /// Longest block.
    pub block_max: u32,
    /// Whether every block is one chunk.
    pub block_is_chunk: bool,
    /// Blocks that do not hold a whole prompt are multiples of this.
    pub block_step: u32,
}

impl SizeLimits {
    /// The limits for a context of `ctx_tokens` and a model whose blocks end at multiples of `block_step`. A block that is asked to be
    /// shorter is one step long.
    #[must_use]
    pub fn new(settings: &EngineSettings, ctx_tokens: u32, block_step: u32) -> Self {
        let stepped = |tokens: u32| tokens.next_multiple_of(block_step).min(ctx_tokens);
        let block_max = match settings.block {
            BlockSetting::Tokens(tokens) => tokens,
            BlockSetting::Auto | BlockSetting::Chunk => ctx_tokens,
        };
        let block_max = stepped(block_max.clamp(1, ctx_tokens));
        let chunk_max = match settings.chunk {
            ChunkSetting::Tokens(tokens) => tokens,
            ChunkSetting::Auto { max } => max.unwrap_or(CHUNK_AUTO_MAX),
        }
        .clamp(1, block_max);
        let block_is_chunk = settings.block == BlockSetting::Chunk;
        let chunk_max = if block_is_chunk { stepped(chunk_max) } else { chunk_max };
        Self { chunk_max, block_max: if block_is_chunk { chunk_max } else { block_max }, block_is_chunk, block_step }
    }

    /// Sizes for a block of `block` tokens, best first: the block as one chunk where that is allowed, then shorter chunks.
    pub fn sizes(self, block: u32) -> impl Iterator<Item = PromptSize> {
        let rings = if block <= self.chunk_max { &CHUNK_RINGS[..] } else { &[][..] };
        let one_chunk = rings.iter().map(move |&ring_slots| PromptSize { ring_slots, ..PromptSize::chunk(block) });
        let forms = if self.block_is_chunk { &[][..] } else { &BLOCK_FORMS[..] };
        let longer = forms.iter().map(move |&(chunk, ring_slots)| PromptSize {
            chunk: chunk.min(self.chunk_max),
            ring_slots,
            ..PromptSize::chunk(block)
        });
        one_chunk.chain(longer.filter(move |size| size.chunk < block))
    }

    /// The longest chunk that fits as a block of its own; 0 where none does.
    pub fn largest_chunk(self, fits: impl Fn(PromptSize) -> bool) -> u32 {
        largest_stepped(self.chunk_max, self.block_step, |chunk| fits(PromptSize::chunk(chunk)))
    }

    /// The size with the longest block that fits, the best form among equals; `None` where not even one token does.
    pub fn largest_block(self, fits: impl Fn(PromptSize) -> bool) -> Option<PromptSize> {
        let fitting_size = |block| self.sizes(block).find(|&size| fits(size));
        let block = largest_stepped(self.block_max, self.block_step, |block| fitting_size(block).is_some());
        fitting_size(block)
    }
}

/// The largest number from 1 to `limit` that fits, where everything below a fitting number fits; 0 where none does.
pub fn largest_fitting(limit: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut fitting, mut limit) = (0, limit);
    // Invariant: `fitting` fits (or is 0), everything above `limit` does not or is not wanted.
    while fitting < limit {
        let middle = limit - (limit - fitting) / 2;
        if fits(middle) {
            fitting = middle;
        } else {
            limit = middle - 1;
        }
    }
    fitting
}

/// As [`largest_fitting`] among the multiples of `step`, and `limit`.
pub fn largest_stepped(limit: u32, step: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let nth = |steps: u32| steps.saturating_mul(step).min(limit);
    nth(largest_fitting(limit.div_ceil(step), |steps| fits(nth(steps))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(chunk: ChunkSetting, block: BlockSetting) -> SizeLimits {
        SizeLimits::new(&EngineSettings { chunk, block, ..EngineSettings::default() }, 32_768, 1)
    }

    /// A token of a block costs 1, one of a chunk 5, an expert in flight 100.
    fn fits(room: u32) -> impl Fn(PromptSize) -> bool {
        move |size| size.block + 5 * size.chunk + 100 * size.ring_slots <= room
    }

    #[test]
    fn settings_bound_chunk_and_block_and_a_block_bounds_its_chunk() {
        let auto = ChunkSetting::default();
        assert_eq!(
            limits(auto, BlockSetting::Auto),
            SizeLimits { chunk_max: 8192, block_max: 32_768, block_is_chunk: false, block_step: 1 }
        );
        let longest = |chunk, block| {
            let SizeLimits { chunk_max, block_max, .. } = limits(chunk, block);
            (chunk_max, block_max)
        };
        assert_eq!(longest(auto, BlockSetting::Tokens(300)), (300, 300));
        assert_eq!(longest(ChunkSetting::Tokens(64), BlockSetting::Auto), (64, 32_768));
        assert_eq!(longest(ChunkSetting::Auto { max: Some(9) }, BlockSetting::Tokens(70_000)), (9, 32_768));
        assert_eq!(longest(ChunkSetting::Tokens(64), BlockSetting::Chunk), (64, 64));
    }

    #[test]
    fn a_longer_block_has_a_shorter_chunk_and_the_longest_that_fits_is_found() {
        let limits = limits(ChunkSetting::default(), BlockSetting::Auto);
        assert_eq!(limits.largest_chunk(fits(7600)), 1000);
        let size = limits.largest_block(fits(7600)).expect("fits");
        assert_eq!((size.chunk, size.block, size.ring_slots), (64, 7600 - 5 * 64 - 400, 4));
        assert_eq!(limits.largest_block(fits(100)), None);
        let roomy = limits.largest_block(fits(u32::MAX)).expect("fits");
        assert_eq!((roomy.block, roomy.chunk), (32_768, 4096), "one chunk of the whole context is not allowed");
    }

    #[test]
    fn blocks_of_a_model_with_steps_are_whole_steps_or_the_whole_context() {
        let limits =
            |block| SizeLimits::new(&EngineSettings { chunk: ChunkSetting::Tokens(7), block, ..EngineSettings::default() }, 1000, 64);
        let longest = |block| (limits(block).chunk_max, limits(block).block_max);
        assert_eq!([BlockSetting::Tokens(7), BlockSetting::Tokens(65), BlockSetting::Auto].map(longest), [(7, 64), (7, 128), (7, 1000)]);
        assert_eq!(longest(BlockSetting::Chunk), (64, 64));
        let size = limits(BlockSetting::Auto).largest_block(fits(435 + 300)).expect("fits");
        assert_eq!((size.chunk, size.block), (7, 256));
        assert_eq!(largest_stepped(100, 64, |tokens| tokens < 64), 0);
        assert_eq!(largest_stepped(100, 64, |_| true), 100);
    }

    #[test]
    fn a_block_of_one_chunk_is_the_first_form() {
        let limits = limits(ChunkSetting::Tokens(512), BlockSetting::Tokens(512));
        let sizes: Vec<_> = limits.sizes(512).map(|size| (size.chunk, size.ring_slots)).collect();
        let rings = [80, 72, 64, 56, 48, 40, 32, 16];
        assert!(sizes.iter().copied().eq(rings.map(|ring| (512, ring)).into_iter().chain([(256, 16), (128, 8), (64, 4)])), "{sizes:?}");
        let document = self::limits(ChunkSetting::default(), BlockSetting::Chunk);
        assert!(document.sizes(512).all(|size| size.chunk == 512 && size.block == 512));
    }
}
