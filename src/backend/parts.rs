//! What operations that join several steps stand for: the same steps, one after another.

use super::op::{Op, Path};

impl Op {
    /// The operations that this one does in one step, in order; none where it is a step itself. Their results are its results, so a
    /// backend may run them instead.
    #[must_use]
    pub fn parts(&self) -> Option<Vec<Self>> {
        match *self {
            Self::NormQuantise { x, weight, out, ref quantised, n_rows, n_cols, eps } => {
                let norm = Self::RmsNorm { x, weight, out, n_rows, n_cols, eps };
                let quantise = |&(to, format)| Self::Quantise { x: out, out: to, n_rows, n_cols, format };
                Some([norm].into_iter().chain(quantised.iter().map(quantise)).collect())
            }
            Self::WindowProducts { ref products, input, format, n_rows } => {
                let (path, accumulate) = (Path::Window, false);
                let product = |&(weights, out)| Self::MatMul { weights, input, format, out, n_rows, path, accumulate };
                Some(products.iter().map(product).collect())
            }
            Self::StoreHeads {
                q,
                k,
                v,
                q_weight,
                k_weight,
                rope_positions,
                k_cache,
                v_cache,
                format,
                positions,
                first_row,
                n_rows,
                n_head,
                n_head_kv,
                head_dim,
                n_rot,
                freq_base,
                eps,
                n_ctx,
            } => {
                let turn = |x, weight, n_head| Self::HeadNormRope {
                    x,
                    weight,
                    positions: rope_positions,
                    n_rows,
                    n_head,
                    head_dim,
                    n_rot,
                    freq_base,
                    eps,
                };
                let store = |rows, cache| Self::KvStore { rows, cache, format, positions, first_row, n_rows, n_head_kv, head_dim, n_ctx };
                Some(vec![turn(q, q_weight, n_head), turn(k, k_weight, n_head_kv), store(k, k_cache), store(v, v_cache)])
            }
            Self::SwiGluQuantise { gate, up, out, n_rows, n_cols, format } => {
                Some(vec![Self::SwiGlu { gate, up, n_rows, n_cols }, Self::Quantise { x: gate, out, n_rows, n_cols, format }])
            }
            _ => None,
        }
    }
}
