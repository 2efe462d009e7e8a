//! Operations that are refused: by their shapes on every device, by addresses and contents of memory on the simulated one.

use ebbtide::backend::op::{DeltaShape, ExpertAddrs, ExpertShape, KvFormat, Matrix, Op, Path, PromptExpert};
use ebbtide::backend::{Addr, AddrRange, Backend, BackendError};
use ebbtide::quant::{ActivationFormat, QuantType};

use crate::device::Rig;

/// Every operation with one size or type that no kernel takes. Addresses do not matter: shapes are refused before.
pub fn shapes_that_no_kernel_takes_are_refused<B: Backend>(rig: &Rig<B>) {
    let at = Addr(256);
    let norm = |n_rows, n_cols| Op::RmsNorm { x: at, weight: at, out: at, n_rows, n_cols, eps: 0.0 };
    let quantise = |n_cols, format| Op::Quantise { x: at, out: at, n_rows: 1, n_cols, format };
    let mat_mul = |quant_type, rows, cols, format, n_rows, path| {
        let weights = Matrix { addr: at, quant_type, rows, cols };
        Op::MatMul { weights, input: at, format, out: at, n_rows, path, accumulate: false, unpacked: AddrRange::EMPTY }
    };
    let rope = |n_head, head_dim, n_rot| {
        let (n_rows, freq_base, eps) = (1, 1e4, 0.0);
        Op::HeadNormRope { x: at, weight: at, positions: at, n_rows, n_head, head_dim, n_rot, freq_base, eps }
    };
    let store = |format, n_head_kv, head_dim, n_ctx| Op::KvStore {
        rows: at,
        cache: at,
        format,
        positions: at,
        first_row: at,
        n_rows: 1,
        n_head_kv,
        head_dim,
        n_ctx,
    };
    let attention = |format, n_head, n_head_kv, head_dim| {
        let (n_rows, n_ctx, scale, path) = (1, 8, 1.0, Path::Prompt);
        let (q, k_cache, v_cache, positions, first_row, out) = (at, at, at, at, at, at);
        Op::Attention { q, k_cache, v_cache, format, positions, first_row, out, n_rows, n_head, n_head_kv, head_dim, n_ctx, scale, path }
    };
    let router = |n_expert, n_used| Op::Router { logits: at, ids: at, weights: at, n_rows: 1, n_expert, n_used, scale: 1.0 };
    let shape = |n_embd, n_ff, down_format| {
        let quant = QuantType::Q4_K;
        let input_format = ActivationFormat::Q8_K;
        ExpertShape { n_embd, n_ff, gate_type: quant, up_type: quant, down_type: quant, input_format, down_format }
    };
    let window = |shape, n_rows, n_used| Op::ExpertsWindow {
        input: at,
        ids: at,
        weights: at,
        table: at,
        residual: at,
        n_rows,
        n_expert: 4,
        n_used,
        shape,
        scratch: at,
    };
    let prompt = |shape, tile_rows| Op::ExpertsPrompt {
        experts: Vec::new(),
        input: at,
        n_input_rows: 1,
        rows: at,
        row_weights: at,
        entries: at,
        n_used: 1,
        residual: at,
        shape,
        scratch: at,
        tile_rows,
        unpacked: AddrRange::EMPTY,
    };
    let apart = |second| {
        let one = |first| PromptExpert { weights: ExpertAddrs { gate: at, up: at, down: at }, first, count: 1 };
        let Op::ExpertsPrompt {
            input,
            n_input_rows,
            rows,
            row_weights,
            entries,
            n_used,
            residual,
            shape,
            scratch,
            tile_rows,
            unpacked,
            ..
        } = prompt(shape(256, 256, ActivationFormat::Q8_K), 4)
        else {
            unreachable!("made as such")
        };
        let experts = vec![one(3), one(second)];
        Op::ExpertsPrompt {
            experts,
            input,
            n_input_rows,
            rows,
            row_weights,
            entries,
            n_used,
            residual,
            shape,
            scratch,
            tile_rows,
            unpacked,
        }
    };
    let split = |n_rows, n_head, head_dim| Op::SplitGates { joined: at, values: at, gates: at, n_rows, n_head, head_dim };
    let gated_norm = |n_head, head_dim| Op::GatedHeadNorm { x: at, weight: at, gates: at, n_rows: 1, n_head, head_dim, eps: 0.0 };
    let net = |n_head_k, n_head_v, head_dim, n_taps| DeltaShape { n_head_k, n_head_v, head_dim, n_taps };
    let conv = |n_rows, shape| Op::DeltaConv { x: at, history: at, taps: at, out: at, n_rows, shape, eps: 0.0 };
    let delta_prompt = |shape, n_rows, position, block_position| {
        let (qkv, beta, decay, state, open, out, ends_block) = (at, at, at, at, at, at, true);
        Op::DeltaPrompt { qkv, beta, decay, state, open, out, n_rows, position, block_position, ends_block, shape }
    };
    let delta_window = |shape, n_rows| Op::DeltaWindow { qkv: at, beta: at, decay: at, state: at, out: at, n_rows, shape };
    let delta_commit = |shape, n_rows| Op::DeltaCommit { qkv: at, beta: at, decay: at, state: at, n_rows, shape };
    let (f32s, q8_0, q8_k) = (ActivationFormat::F32, ActivationFormat::Q8_0, ActivationFormat::Q8_K);
    let refused = [
        norm(0, 4),
        norm(4, 0),
        norm(u32::MAX, u32::MAX),
        quantise(0, f32s),
        quantise(33, q8_0),
        quantise(128, q8_k),
        mat_mul(QuantType::Q8_0, 4, 33, q8_0, 1, Path::Prompt),
        mat_mul(QuantType::Q4_K, 4, 32, f32s, 1, Path::Prompt),
        mat_mul(QuantType::Q8_0, 4, 256, q8_k, 1, Path::Window),
        mat_mul(QuantType::F32, 4, 32, q8_0, 1, Path::Window),
        mat_mul(QuantType::F32, 4, 32, f32s, 9, Path::Window),
        mat_mul(QuantType::F32, 4, 32, f32s, 0, Path::Prompt),
        mat_mul(QuantType::F32, 0, 32, f32s, 1, Path::Prompt),
        rope(1, 8, 3),
        rope(1, 8, 10),
        rope(0, 8, 8),
        store(KvFormat::Q8_0, 1, 48, 8),
        store(KvFormat::F16, 1, 48, 0),
        store(KvFormat::F16, u32::MAX, u32::MAX, u32::MAX),
        attention(KvFormat::F32, 5, 2, 32),
        attention(KvFormat::F32, 4, 0, 32),
        attention(KvFormat::Q8_0, 4, 2, 40),
        router(4, 5),
        router(4, 0),
        router(0, 0),
        window(shape(256, 256, q8_k), 9, 2),
        window(shape(256, 256, q8_k), 1, 5),
        window(shape(256, 256, q8_0), 1, 2),
        window(shape(256, 300, q8_k), 1, 2),
        window(shape(0, 256, q8_k), 1, 2),
        prompt(shape(256, 256, q8_k), 0),
        prompt(shape(256, 256, ActivationFormat::F16), 4),
        apart(3),
        apart(5),
        mat_mul(QuantType::Q8_0, 4, 32, ActivationFormat::F16, 1, Path::Window),
        mat_mul(QuantType::Q8_0, 4, 32, ActivationFormat::F16, 1, Path::Prompt),
        prompt(shape(128, 256, q8_k), 1),
        prompt(shape(256, 256, q8_0), 1),
        split(0, 2, 8),
        split(1, u32::MAX, u32::MAX),
        Op::JoinRows { left: at, right: at, out: at, n_rows: 1, n_cols: 0 },
        Op::SigmoidGate { x: at, gates: at, n_rows: 0, n_cols: 4 },
        Op::SwiGlu { gate: at, up: at, n_rows: 4, n_cols: 0 },
        Op::AddGated { sum: at, x: at, gate: at, n_rows: u32::MAX, n_cols: u32::MAX },
        gated_norm(0, 16),
        gated_norm(2, 0),
        conv(0, net(1, 2, 16, 4)),
        conv(1, net(1, 2, 16, 1)),
        conv(1, net(2, 3, 16, 4)),
        conv(1, net(0, 2, 16, 4)),
        conv(1, net(1, 0, 16, 4)),
        conv(1, net(1, 2, 0, 4)),
        conv(1, net(1, 2, 24, 4)),
        conv(u32::MAX, net(1 << 10, 1 << 10, 128, 4)),
        conv(1, net(1 << 10, 1 << 10, 128, u32::MAX)),
        Op::DeltaHistory { x: at, history: at, n_rows: 1, shape: net(1, 2, 16, 0) },
        Op::DeltaHistory { x: at, history: at, n_rows: 1, shape: net(1 << 20, 1 << 20, 1 << 12, 4) },
        Op::DeltaGates { beta: at, decay: at, dt_bias: at, a: at, n_rows: 1, n_head: 0 },
        delta_prompt(net(1, 2, 16, 4), 1, 7, 8),
        delta_prompt(net(1, 2, 16, 4), 9, u32::MAX - 8, 0),
        delta_prompt(net(u32::MAX, u32::MAX, 16, 4), 1, 8, 8),
        delta_prompt(net(1, 2, 8, 4), 1, 8, 8),
        delta_window(net(1, 2, 16, 4), 9),
        delta_window(net(1, 2, 16, 4), 0),
        delta_window(net(1, 1, 1 << 28, 4), 1),
        delta_commit(net(1, 2, 16, 4), 9),
        delta_commit(net(3, 2, 16, 4), 1),
    ];
    for op in refused {
        let outcome = rig.run(&op);
        assert!(matches!(&outcome, Err(BackendError::BadOperand { op: name, .. }) if *name == op.name()), "{op:?}: {outcome:?}");
    }
}

/// What the simulated device finds wrong in addresses and in the contents of memory, where a real device computes garbage.
mod host_only {
    use ebbtide::backend::DeviceMemory;
    use ebbtide::backend::op::{ExpertAddrs, PromptExpert, expert_scratch_bytes};
    use ebbtide::backends::host::HostBackend;
    use ebbtide::units::Bytes;

    use super::*;
    use crate::device::{bytes_of, start};
    use crate::experts::{Experts, N_EMBD, experts};
    use crate::{activations, open_host};

    fn rig() -> Rig<HostBackend> {
        Rig::new(open_host())
    }

    fn norm(x: Addr, weight: Addr, out: Addr) -> Op {
        Op::RmsNorm { x, weight, out, n_rows: 2, n_cols: 8, eps: 0.0 }
    }

    #[test]
    fn an_output_that_overlaps_an_input_is_refused() {
        let rig = rig();
        let memory = rig.upload_f32(&[1.0; 64]);
        let at = |index: u64| start(&memory).offset(Bytes(4 * index));
        for (x, weight, out) in [(0, 32, 0), (0, 32, 15), (15, 40, 0), (0, 32, 39), (0, 39, 32)] {
            let refused = rig.run(&norm(at(x), at(weight), at(out)));
            assert!(matches!(refused, Err(BackendError::Overlap { what: "rms_norm", .. })), "{x} {weight} {out}: {refused:?}");
        }
        rig.run(&norm(at(0), at(4), at(16))).expect("two inputs may overlap, and an output may follow an input");
    }

    #[test]
    fn operands_outside_of_live_memory_are_refused() {
        let rig = rig();
        let (x, weight, out) = (rig.upload_f32(&[1.0; 16]), rig.upload_f32(&[1.0; 8]), rig.buffer(64));
        let bad = [Addr(0), Addr(u64::MAX), Addr(u64::MAX - 7), start(&x).offset(Bytes(4)), x.range().end()];
        for addr in bad {
            for op in [norm(addr, start(&weight), start(&out)), norm(start(&x), start(&weight), addr), norm(start(&x), addr, start(&out))] {
                let refused = rig.run(&op);
                let expected = matches!(refused, Err(BackendError::BadAddress { .. }));
                // Eight weights do fit behind the first of sixteen numbers.
                let fits = addr == start(&x).offset(Bytes(4)) && matches!(op, Op::RmsNorm { weight, .. } if weight == addr);
                assert!(expected || (fits && refused.is_ok()), "{op:?}: {refused:?}");
            }
        }
    }

    #[test]
    fn an_operand_at_an_odd_address_is_refused() {
        let rig = rig();
        let (x, weight, out) = (rig.buffer(68), rig.upload_f32(&[1.0; 8]), rig.buffer(64));
        let refused = rig.run(&norm(start(&x).offset(Bytes(1)), start(&weight), start(&out)));
        assert!(matches!(refused, Err(BackendError::BadOperand { op: "rms_norm", .. })), "{refused:?}");
    }

    #[test]
    fn positions_that_are_poisoned_negative_beyond_the_cache_or_out_of_order_are_errors() {
        let rig = rig();
        let (rows, cache, poisoned) = (rig.upload_f32(&[1.0; 8]), rig.upload_f32(&[0.0; 32]), rig.buffer(12));
        let mut lists: Vec<_> = [[-1, 2, 0], [0, 8, 0], [3, 3, 0], [5, 1, 0], [0, 1, -1], [0, 1, 7], [0, 1, i32::MAX]]
            .iter()
            .map(|list| rig.upload_i32(list))
            .collect();
        lists.push(poisoned);
        for positions in &lists {
            let (rows, cache, positions) = (start(&rows), start(&cache), start(positions));
            let first_row = positions.offset(Bytes(8));
            let format = KvFormat::F32;
            let refused =
                rig.run(&Op::KvStore { rows, cache, format, positions, first_row, n_rows: 2, n_head_kv: 1, head_dim: 4, n_ctx: 8 });
            assert!(matches!(refused, Err(BackendError::BadOperand { op: "kv_store", .. })), "{refused:?}");
        }
        assert_eq!(rig.download_f32(&cache), [0.0; 32], "a refused operation writes nothing");
    }

    /// A window of one row with two of four experts, each operand in a buffer of its own.
    fn window(rig: &Rig<HostBackend>, experts: &Experts<HostBackend>, ids: Addr, table: Addr) -> Result<(), BackendError> {
        let (input, _) = activations(rig, experts.shape.input_format, &[1.0; N_EMBD as usize], N_EMBD);
        let (shares, residual) = (rig.upload_f32(&[0.5, 0.5]), rig.upload_f32(&[0.0; N_EMBD as usize]));
        let scratch = rig.buffer(Bytes(expert_scratch_bytes(&experts.shape, 2)).as_usize());
        rig.run(&Op::ExpertsWindow {
            input: start(&input),
            ids,
            weights: start(&shares),
            table,
            residual: start(&residual),
            n_rows: 1,
            n_expert: 4,
            n_used: 2,
            shape: experts.shape,
            scratch: start(&scratch),
        })
    }

    #[test]
    fn poisoned_or_disordered_experts_and_a_poisoned_table_are_errors() {
        let rig = rig();
        let experts = experts(&rig, 4, [QuantType::Q4_K; 3], [ActivationFormat::Q8_K; 2]);
        let table = rig.upload(&experts.addrs.iter().flat_map(|addrs| addrs.to_bytes()).collect::<Vec<u8>>());
        let good = rig.upload_i32(&[1, 2]);
        window(&rig, &experts, start(&good), start(&table)).expect("the window itself is right");
        for ids in [rig.buffer(8), rig.upload_i32(&[2, 1]), rig.upload_i32(&[1, 1]), rig.upload_i32(&[1, 4])] {
            let refused = window(&rig, &experts, start(&ids), start(&table));
            assert!(matches!(refused, Err(BackendError::BadOperand { op: "experts_window", .. })), "{refused:?}");
        }
        let poisoned = rig.buffer(4 * ExpertAddrs::BYTES);
        let refused = window(&rig, &experts, start(&good), start(&poisoned));
        assert!(matches!(refused, Err(BackendError::BadAddress { addr: Addr(u64::MAX), .. })), "{refused:?}");
    }

    #[test]
    fn a_window_that_would_write_into_its_state_and_an_open_step_that_is_too_short_are_refused() {
        let rig = rig();
        let shape = DeltaShape { n_head_k: 1, n_head_v: 1, head_dim: 16, n_taps: 4 };
        let (qkv, gates, state) = (rig.upload_f32(&[0.1; 48]), rig.upload_f32(&[0.1]), rig.upload_f32(&[0.0; 256]));
        let (qkv, beta, decay) = (start(&qkv), start(&gates), start(&gates));
        let window = |out| Op::DeltaWindow { qkv, beta, decay, state: start(&state), out, n_rows: 1, shape };
        let refused = rig.run(&window(start(&state)));
        assert!(matches!(refused, Err(BackendError::Overlap { what: "delta_window", .. })), "{refused:?}");
        let out = rig.buffer(64);
        rig.run(&window(start(&out))).expect("runs");
        let too_short = rig.buffer(Bytes(shape.open_bytes()).as_usize() - 4);
        let (position, block_position, ends_block) = (0, 0, false);
        let (state, open, out) = (start(&state), start(&too_short), start(&out));
        let prompt = Op::DeltaPrompt { qkv, beta, decay, state, open, out, n_rows: 1, position, block_position, ends_block, shape };
        let refused = rig.run(&prompt);
        assert!(matches!(refused, Err(BackendError::BadAddress { .. })), "{refused:?}");
    }

    #[test]
    fn a_row_list_that_names_no_row_is_an_error() {
        let rig = rig();
        let experts = experts(&rig, 1, [QuantType::F32; 3], [ActivationFormat::F32; 2]);
        let (input, shares) = (rig.upload_f32(&[1.0; 2 * N_EMBD as usize]), rig.upload(&bytes_of(&[1.0; 2])));
        let (residual, scratch) =
            (rig.upload_f32(&[0.0; 2 * N_EMBD as usize]), rig.buffer(Bytes(expert_scratch_bytes(&experts.shape, 2)).as_usize()));
        for rows in [rig.upload_i32(&[0, 2]), rig.buffer(8)] {
            let refused = rig.run(&Op::ExpertsPrompt {
                experts: vec![PromptExpert { weights: experts.addrs[0], first: 0, count: 2 }],
                input: start(&input),
                n_input_rows: 2,
                rows: start(&rows),
                row_weights: start(&shares),
                entries: start(&rows),
                n_used: 1,
                residual: start(&residual),
                shape: experts.shape,
                scratch: start(&scratch),
                tile_rows: 2,
                unpacked: AddrRange::EMPTY,
            });
            assert!(matches!(refused, Err(BackendError::BadOperand { op: "experts_prompt", .. })), "{refused:?}");
        }
    }
}
