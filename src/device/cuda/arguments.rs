//! The structs that kernels take, field by field as in `cuda/include/arguments.h`, which says what each means. A kernel carries
//! the size of its struct, and `launch` refuses a difference.

/// The address of something on the device; 0 is null.
pub type Address = u64;

/// A struct that a kernel takes as its only parameter.
///
/// # Safety
/// The type is `repr(C)`, without padding bytes that a kernel could read, and mirrors the kernel's own struct.
pub unsafe trait Arguments: Copy {}

macro_rules! arguments {
    ($(struct $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            $(pub $field: $type,)*
        }
        // SAFETY: repr(C), and all fields are numbers; arguments.h has a reserved field where C would pad.
        unsafe impl Arguments for $name {}
    )*};
}

/// What a compiled kernel says of itself (`NAME_launch`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchShape {
    pub threads: i32,
    pub shared_bytes: i32,
    pub argument_bytes: i32,
    pub reserved: i32,
}

pub const KEYS_PER_PAGE: usize = 64;
pub const QUERIES_PER_TILE: usize = 64;
/// The most columns that `rms_norm` and `rms_norm_wide` take.
pub const NORM_WIDTH: usize = 8192;
pub const NORM_WIDTH_WIDE: usize = 20480;
/// The most columns of a projected row.
pub const PROJECTED_WIDTH: usize = 12288;
/// Largest vocabulary of the head's kernels.
pub const HEAD_MAX_VOCABULARY: usize = 262_144;

/// New rows of one sequence in a pass, or a tile of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSpan {
    pub row: i32,
    pub length: i32,
    pub past: i32,
    pub page: i32,
}

/// One page of keys that were computed here, and the tiles of queries that see any of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionKeys {
    pub block: i32,
    pub first: i32,
    pub row: i32,
    pub length: i32,
    pub first_tile: i32,
    pub end_tile: i32,
}

/// The heads of a layer, and the key/value heads that pages hold.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadRange {
    pub query_heads: i32,
    pub key_value_heads: i32,
    pub first: i32,
    pub count: i32,
}

arguments! {
    struct CastToBf16 {
        from: Address,
        to: Address,
        length: i64,
    }
    struct CastToFloat {
        from: Address,
        to: Address,
        length: i64,
    }
    struct AccumulateFloats {
        from: Address,
        to: Address,
        length: i64,
    }
    struct ScaleFloats {
        values: Address,
        length: i64,
        factor: f32,
        reserved: i32,
    }
    struct MoveRows {
        from: Address,
        to: Address,
        rows: Address,
        count: i64,
        width: i64,
    }
    struct SumParts {
        parts: Address,
        into: Address,
        count: i64,
        width: i64,
        pitch: i64,
    }
    struct Embed {
        table: Address,
        ids: Address,
        x: Address,
        rows: i64,
        width: i64,
    }
    struct EmbedBackward {
        dx: Address,
        order: Address,
        starts: Address,
        ids: Address,
        dtable: Address,
        unique: i64,
        width: i64,
    }
    struct RmsNorm {
        x: Address,
        branch: Address,
        weight: Address,
        sum: Address,
        y: Address,
        rows: i64,
        width: i64,
        epsilon: f32,
        reserved: i32,
    }
    struct RmsNormBackward {
        dy: Address,
        x: Address,
        weight: Address,
        dx: Address,
        parts: Address,
        rows: i64,
        width: i64,
        rows_per_part: i64,
        epsilon: f32,
        reserved: i32,
    }
    struct Rotate {
        projected: Address,
        bias: Address,
        query_norm: Address,
        key_norm: Address,
        table: Address,
        positions: Address,
        rotated: Address,
        rows: i64,
        query_heads: i32,
        key_value_heads: i32,
        epsilon: f32,
        reserved: i32,
    }
    struct RotateBackward {
        projected: Address,
        bias: Address,
        query_norm: Address,
        key_norm: Address,
        table: Address,
        positions: Address,
        gradient: Address,
        parts: Address,
        rows: i64,
        rows_per_part: i64,
        part_width: i64,
        query_heads: i32,
        key_value_heads: i32,
        epsilon: f32,
        reserved: i32,
    }
    struct AppendKeysValues {
        rotated: Address,
        spans: Address,
        span_of_row: Address,
        pages: Address,
        rows: i64,
        query_heads: i32,
        key_value_heads: i32,
        head_dim: i32,
        reserved: i32,
    }
    struct KeyBlockRows {
        rotated: Address,
        tiles: Address,
        pages: Address,
        blocks: Address,
        heads: HeadRange,
        head_dim: i32,
        reserved: i32,
    }
    struct AttentionForward {
        rotated: Address,
        tiles: Address,
        blocks: Address,
        pages: Address,
        output: Address,
        log_sum_exp: Address,
        segment: i64,
        heads: HeadRange,
        scale: f32,
        reserved: i32,
    }
    struct AttentionDecode {
        rotated: Address,
        spans: Address,
        pages: Address,
        partial: Address,
        output: Address,
        segment: i64,
        span_count: i32,
        segments: i32,
        query_heads: i32,
        key_value_heads: i32,
        scale: f32,
        reserved: i32,
    }
    struct AttentionDelta {
        doutput: Address,
        output: Address,
        delta: Address,
        rows: i64,
        query_heads: i32,
        reserved: i32,
    }
    struct QueryRows {
        queries: Address,
        doutputs: Address,
        log_sum_exps: Address,
        deltas: Address,
        query_pitch: i64,
        doutput_pitch: i64,
        statistic_pitch: i64,
    }
    struct WriteSharedQueries {
        from: QueryRows,
        rows: Address,
        to: Address,
        count: i64,
        pitch: i64,
        query_heads: i32,
        head_dim: i32,
    }
    struct AttentionBackwardKeys {
        queries: QueryRows,
        tiles: Address,
        keys: Address,
        blocks: Address,
        drotated: Address,
        heads: HeadRange,
        scale: f32,
        reserved: i32,
    }
    struct AttentionBackwardQueries {
        rotated: Address,
        doutput: Address,
        log_sum_exp: Address,
        delta: Address,
        tiles: Address,
        blocks: Address,
        pages: Address,
        drotated: Address,
        heads: HeadRange,
        scale: f32,
        reserved: i32,
    }
    struct SwiGlu {
        gate_up: Address,
        y: Address,
        rows: i64,
        width: i64,
    }
    struct SwiGluBackward {
        dy: Address,
        gate_up: Address,
        y: Address,
        rows: i64,
        width: i64,
    }
    struct Gemm {
        a: Address,
        b: Address,
        c: Address,
        m: i64,
        n: i64,
        k: i64,
        pitch_a: i64,
        pitch_b: i64,
        pitch_c: i64,
    }
    struct HeadScores {
        logits: Address,
        targets: Address,
        log_probs: Address,
        entropies: Address,
        log_sum_exps: Address,
        rows: i64,
        vocabulary: i64,
        pitch: i64,
        inverse_temperature: f32,
        reserved: i32,
    }
    struct HeadGradient {
        logits: Address,
        targets: Address,
        log_probs: Address,
        entropies: Address,
        log_sum_exps: Address,
        dlog_probs: Address,
        dentropies: Address,
        dlogits: Address,
        rows: i64,
        vocabulary: i64,
        pitch: i64,
        pitch_d: i64,
        inverse_temperature: f32,
        reserved: i32,
    }
    struct HeadSample {
        logits: Address,
        uniforms: Address,
        tokens: Address,
        log_probs: Address,
        rows: i64,
        vocabulary: i64,
        sampleable: i64,
        pitch: i64,
        inverse_temperature: f32,
        greedy: i32,
    }
    struct AdamW {
        weights: Address,
        rounded: Address,
        gradient: Address,
        first: Address,
        second: Address,
        length: i64,
        learning_rate: f32,
        beta1: f32,
        beta2: f32,
        epsilon: f32,
        weight_decay: f32,
        correction1: f32,
        correction2: f32,
        gradient_scale: f32,
    }
    struct SumOfSquares {
        values: Address,
        parts: Address,
        total: Address,
        length: i64,
        count: i64,
    }
}
