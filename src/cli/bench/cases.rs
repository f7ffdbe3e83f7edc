//! One case per kernel for `learner bench kernels`: the operation that launches it, on inputs of a stated shape, and its floor.

use super::inputs::{Matrix, active, drawn, empty, ids, scattered};
use crate::device::cuda::roofline::{self, Minimum};
use crate::device::cuda::{Buffer, PagedKeyValues};
use crate::device::{
    AdamWStep, AttendedRows, AttentionPlan, Cotangents, CudaDevice, Device, Heads, Role, Rotation, RotationGradients,
    SharedQueries, Span,
};

/// The shapes of all cases.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Of kernels bound by memory.
    pub rows: usize,
    pub width: usize,
    pub heads: Heads,
    /// Of the products: `[m, n]` over `k`, alike.
    pub product: usize,
    /// Of one sequence under attention.
    pub length: usize,
    /// Decoded together, each over `length` keys.
    pub sequences: usize,
    pub head_rows: usize,
    pub head_inputs: usize,
    pub vocabulary: usize,
}

impl Sizes {
    /// What an emulated GPU does in a few minutes.
    pub const EMULATED: Sizes = Sizes {
        rows: 2048,
        width: 1024,
        heads: Heads { query_heads: 8, key_value_heads: 4, head_dim: 64 },
        product: 256,
        length: 256,
        sequences: 4,
        head_rows: 16,
        head_inputs: 64,
        vocabulary: 151_936,
    };
    /// What fills a GPU: a layer of Qwen3-8B over 8,192 tokens.
    pub const REAL: Sizes = Sizes {
        rows: 8192,
        width: 4096,
        heads: Heads { query_heads: 32, key_value_heads: 8, head_dim: 128 },
        product: 4096,
        length: 8192,
        sequences: 64,
        head_rows: 384,
        head_inputs: 4096,
        vocabulary: 151_936,
    };
}

/// A kernel that a case launches: its name, or what the name begins with where the device chooses a variant.
pub struct Watched {
    pub kernel: String,
    pub shape: String,
    pub minimum: Minimum,
}

/// An operation ready to run, with the kernels to watch.
pub struct Case {
    pub watched: Vec<Watched>,
    pub prepare: fn(&CudaDevice, &Sizes) -> Operation,
}

/// Runs on the device for which it was prepared, as often as it is called.
pub type Operation = Box<dyn FnMut(&CudaDevice)>;

fn watch(kernel: impl Into<String>, shape: impl Into<String>, minimum: Minimum) -> Watched {
    Watched { kernel: kernel.into(), shape: shape.into(), minimum }
}

/// All cases, in the order of the files in `cuda/`.
pub fn cases(sizes: &Sizes) -> Vec<Case> {
    let &Sizes { rows, width, heads, product, length, sequences, head_rows, vocabulary, .. } = sizes;
    let numbers = rows * width;
    let [matrix, rows_shape] = [format!("{numbers}"), format!("{rows} x {width}")];
    let rotated = format!("{rows} x ({} + 2 x {}) x {}", heads.query_heads, heads.key_value_heads, heads.head_dim);
    let sequence = format!("{length} tokens, {} / {} heads of {}", heads.query_heads, heads.key_value_heads, heads.head_dim);
    let decoded =
        format!("{sequences} x {length} keys, {} / {} heads of {}", heads.query_heads, heads.key_value_heads, heads.head_dim);
    let square = format!("{product} x {product} x {product}");
    let logits = format!("{head_rows} x {vocabulary}");
    let of_dim = |kernel: &str| format!("{kernel}_d{}", heads.head_dim);
    let parts = format!("{} parts x {width}", roofline::row_parts(rows));
    let gemm =
        |layout: &str, bytes| watch(format!("gemm_{layout}"), square.clone(), roofline::gemm(product, product, product, bytes));
    let case = |watched, prepare| Case { watched, prepare };
    vec![
        case(vec![watch("adamw", &matrix, roofline::adamw(numbers))], adamw),
        case(
            vec![
                watch("append_keys_values", &sequence, roofline::append_keys_values(length, heads)),
                watch(of_dim("attention_forward"), &sequence, roofline::attention_forward(length, heads)),
            ],
            attention,
        ),
        case(vec![watch("write_key_blocks", &sequence, roofline::write_key_blocks(length, heads))], write_key_blocks),
        case(vec![watch("write_shared_queries", &sequence, roofline::write_shared_queries(length, heads))], write_shared_queries),
        case(
            vec![
                watch(of_dim("attention_delta"), &sequence, roofline::attention_delta(length, heads)),
                watch(of_dim("attention_backward_keys"), &sequence, roofline::attention_backward_keys(length, heads)),
                watch(of_dim("attention_backward_queries"), &sequence, roofline::attention_backward_queries(length, heads)),
            ],
            attention_backward,
        ),
        case(
            vec![
                watch(of_dim("attention_decode"), &decoded, roofline::attention_decode(sequences, length, heads)),
                watch(of_dim("attention_merge"), &decoded, roofline::attention_merge(sequences, heads)),
            ],
            decode,
        ),
        case(vec![watch("cast_to_bf16", &matrix, roofline::cast(numbers))], cast_to_bf16),
        case(vec![watch("cast_to_float", &matrix, roofline::cast(numbers))], cast_to_float),
        case(vec![watch("accumulate_floats", &matrix, roofline::accumulate_floats(numbers))], accumulate),
        case(vec![watch("scale_floats", &matrix, roofline::scale_floats(numbers))], scale),
        case(vec![watch("gather_rows", &rows_shape, roofline::move_rows(rows, width))], gather),
        case(vec![watch("scatter_rows", &rows_shape, roofline::move_rows(rows, width))], scatter),
        case(vec![watch("embed", &rows_shape, roofline::embed(rows, rows, width))], embed),
        case(
            vec![watch(
                "embed_backward",
                format!("{rows_shape}, {} ids", rows / 2),
                roofline::embed_backward(rows, rows / 2, width),
            )],
            embed_backward,
        ),
        case(vec![gemm("nt_bf16", 2)], linear),
        case(vec![gemm("nt_f32", 4)], linear_f32),
        case(vec![gemm("nn_bf16", 2)], linear_input_gradient),
        case(vec![gemm("tn_add", 8)], linear_weight_gradient),
        case(vec![watch("head_scores", &logits, roofline::head_scores(head_rows, vocabulary))], head),
        case(vec![watch("head_gradient", &logits, roofline::head_gradient(head_rows, vocabulary))], head_backward),
        case(vec![watch("head_sample", &logits, roofline::head_sample(head_rows, vocabulary))], head_sample),
        case(vec![watch("rms_norm", &rows_shape, roofline::rms_norm(rows, width))], rms_norm),
        case(vec![watch("rms_norm", format!("{rows_shape}, residual added"), roofline::add_rms_norm(rows, width))], add_rms_norm),
        case(
            vec![
                watch("rms_norm_backward", &rows_shape, roofline::rms_norm_backward(rows, width)),
                watch("sum_parts", parts, roofline::sum_parts(roofline::row_parts(rows), width)),
            ],
            rms_norm_backward,
        ),
        case(vec![watch(of_dim("rotate"), &rotated, roofline::rotate(rows, rows, heads))], rotate),
        case(vec![watch(of_dim("rotate_backward"), &rotated, roofline::rotate_backward(rows, rows, heads))], rotate_backward),
        case(
            vec![
                watch("sum_of_squares", &matrix, roofline::sum_of_squares(numbers)),
                watch("sum_of_parts", &matrix, roofline::sum_of_parts(numbers)),
            ],
            sum_of_squares,
        ),
        case(vec![watch("swiglu", &rows_shape, roofline::swiglu(rows, width))], swiglu),
        case(vec![watch("swiglu_backward", &rows_shape, roofline::swiglu_backward(rows, width))], swiglu_backward),
    ]
}

const EPSILON: f32 = 1e-6;

fn adamw(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let mut matrix = Matrix::new(device, sizes.rows, sizes.width);
    let gradient = drawn(device, Role::Gradients, sizes.rows * sizes.width);
    let [mut first, mut second] = [(); 2].map(|()| device.zeros(Role::Optimizer, sizes.rows * sizes.width));
    let step = AdamWStep {
        learning_rate: 1e-6,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 1,
        gradient_scale: 1.0,
    };
    Box::new(move |device| {
        device.adamw(&mut matrix.values, Some(&mut matrix.packed), &gradient, &mut first, &mut second, step);
    })
}

fn attention(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let (heads, length) = (sizes.heads, sizes.length);
    let rotated = active(device, length * heads.projected_width());
    let mut output = empty(device, length * heads.query_width());
    let mut log_sum_exp = device.zeros(Role::Statistics, length * heads.query_heads);
    let mut cache = device.new_key_values(heads);
    Box::new(move |device| {
        device.clear_key_values(&mut cache);
        let spans = [Span { start: 0, length }];
        device.attention(&rotated, heads, &spans, &mut [&mut cache], &mut output, Some(&mut log_sum_exp));
    })
}

/// One sequence in blocks of keys, all heads in one range, after a forward.
struct Attended {
    heads: Heads,
    plan: AttentionPlan,
    rotated: Buffer,
    blocks: Buffer,
    output: Buffer,
    doutput: Buffer,
    log_sum_exp: Buffer,
    delta: Buffer,
}
impl Attended {
    fn new(device: &CudaDevice, &Sizes { heads, length, .. }: &Sizes, plan: AttentionPlan) -> Attended {
        let numbers = plan.blocks * AttentionPlan::block_numbers(heads.key_value_heads, heads.head_dim);
        let mut attended = Attended {
            heads,
            plan,
            rotated: active(device, length * heads.projected_width()),
            blocks: empty(device, numbers),
            output: empty(device, length * heads.query_width()),
            doutput: active(device, length * heads.query_width()),
            log_sum_exp: device.zeros(Role::Statistics, length * heads.query_heads),
            delta: device.zeros(Role::Statistics, length * heads.query_heads),
        };
        attended.write(device);
        let Attended { plan, rotated, blocks, output, log_sum_exp, .. } = &mut attended;
        device.block_attention(rotated, heads, 0..heads.key_value_heads, plan, blocks, output, log_sum_exp);
        attended
    }
    fn write(&mut self, device: &CudaDevice) {
        device.write_key_blocks(&self.rotated, self.heads, 0..self.heads.key_value_heads, &self.plan, &mut self.blocks);
    }
    fn rows(&self) -> AttendedRows<'_, CudaDevice> {
        let Attended { rotated, doutput, log_sum_exp, delta, .. } = self;
        AttendedRows { rotated, doutput, log_sum_exp, delta }
    }
}

fn write_key_blocks(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let mut attended = Attended::new(device, sizes, AttentionPlan::whole(&[sizes.length]));
    Box::new(move |device| attended.write(device))
}

/// The whole sequence as one rank's part of a shared one.
fn write_shared_queries(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let mut plan = AttentionPlan::whole(&[sizes.length]);
    plan.queries = SharedQueries { rows: sizes.length, own: 0, slices: plan.slices.clone() };
    let attended = Attended::new(device, sizes, plan);
    let heads = attended.heads;
    let mut queries = empty(device, sizes.length * AttentionPlan::query_numbers(heads, &(0..heads.key_value_heads)));
    Box::new(move |device| {
        let range = 0..heads.key_value_heads;
        device.write_shared_queries(attended.rows(), heads, range, &attended.plan, &mut queries);
    })
}

fn attention_backward(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let mut attended = Attended::new(device, sizes, AttentionPlan::whole(&[sizes.length]));
    let (heads, none) = (attended.heads, empty(device, 0));
    let mut drotated = empty(device, sizes.length * heads.projected_width());
    Box::new(move |device| {
        let Attended { plan, output, doutput, delta, .. } = &mut attended;
        device.attention_delta(doutput, output, heads, plan.rows(), delta);
        let range = 0..heads.key_value_heads;
        device.block_attention_backward(attended.rows(), heads, range, &attended.plan, &attended.blocks, &none, &mut drotated);
    })
}

/// Every run gives the sequences as they were before their last token.
fn decode(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let (heads, keys, sequences) = (sizes.heads, sizes.length, sizes.sequences);
    let prompt = active(device, (keys - 1) * heads.projected_width());
    let mut prompt_output = empty(device, (keys - 1) * heads.query_width());
    let mut cache = device.new_key_values(heads);
    let span = [Span { start: 0, length: keys - 1 }];
    device.attention(&prompt, heads, &span, &mut [&mut cache], &mut prompt_output, None);
    let rotated = active(device, sequences * heads.projected_width());
    let mut output = empty(device, sequences * heads.query_width());
    let spans: Vec<Span> = (0..sequences).map(|start| Span { start, length: 1 }).collect();
    Box::new(move |device| {
        let mut caches: Vec<PagedKeyValues> = (0..sequences).map(|_| cache.clone()).collect();
        let mut caches: Vec<&mut PagedKeyValues> = caches.iter_mut().collect();
        device.attention(&rotated, heads, &spans, &mut caches, &mut output, None);
    })
}

fn cast_to_bf16(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let length = sizes.rows * sizes.width;
    let (from, mut to) = (drawn(device, Role::Gradients, length), empty(device, length));
    Box::new(move |device| device.copy(&from, &mut to, length))
}

fn cast_to_float(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let length = sizes.rows * sizes.width;
    let (from, mut to) = (active(device, length), device.zeros(Role::Gradients, length));
    Box::new(move |device| device.copy(&from, &mut to, length))
}

fn accumulate(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let length = sizes.rows * sizes.width;
    let (from, mut to) = (drawn(device, Role::Gradients, length), device.zeros(Role::Gradients, length));
    Box::new(move |device| device.accumulate(&from, &mut to, length))
}

fn scale(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let mut values = drawn(device, Role::Gradients, sizes.rows * sizes.width);
    Box::new(move |device| device.scale(&mut values, 0.5))
}

fn gather(device: &CudaDevice, &Sizes { rows, width, .. }: &Sizes) -> Operation {
    let (from, mut to, numbers) = (active(device, rows * width), empty(device, rows * width), scattered(rows));
    Box::new(move |device| device.gather_rows(&from, &numbers, width, &mut to))
}

fn scatter(device: &CudaDevice, &Sizes { rows, width, .. }: &Sizes) -> Operation {
    let (from, mut to, numbers) = (active(device, rows * width), empty(device, rows * width), scattered(rows));
    Box::new(move |device| device.scatter_rows(&from, &numbers, width, &mut to))
}

fn embed(device: &CudaDevice, &Sizes { rows, width, .. }: &Sizes) -> Operation {
    let (table, mut x, ids) = (drawn(device, Role::Weights, rows * width), empty(device, rows * width), ids(rows, rows));
    Box::new(move |device| device.embed(&table, None, &ids, width, &mut x))
}

fn embed_backward(device: &CudaDevice, &Sizes { rows, width, .. }: &Sizes) -> Operation {
    let (dx, mut dtable) = (active(device, rows * width), device.zeros(Role::Gradients, rows / 2 * width));
    let ids = ids(rows, rows / 2);
    Box::new(move |device| device.embed_backward(&dx, &ids, width, &mut dtable))
}

fn linear(device: &CudaDevice, &Sizes { product, .. }: &Sizes) -> Operation {
    let matrix = Matrix::new(device, product, product);
    let (x, mut y) = (active(device, product * product), empty(device, product * product));
    Box::new(move |device| device.linear(&x, matrix.linear(), &mut y, product))
}

fn linear_f32(device: &CudaDevice, &Sizes { product, .. }: &Sizes) -> Operation {
    let matrix = Matrix::new(device, product, product);
    let (x, mut y) = (active(device, product * product), device.zeros(Role::Statistics, product * product));
    Box::new(move |device| device.linear(&x, matrix.linear(), &mut y, product))
}

fn linear_input_gradient(device: &CudaDevice, &Sizes { product, .. }: &Sizes) -> Operation {
    let matrix = Matrix::new(device, product, product);
    let (dy, mut dx) = (active(device, product * product), empty(device, product * product));
    Box::new(move |device| device.linear_input_gradient(&dy, matrix.linear(), &mut dx, product))
}

fn linear_weight_gradient(device: &CudaDevice, &Sizes { product, .. }: &Sizes) -> Operation {
    let [dy, x] = [(); 2].map(|()| active(device, product * product));
    let mut dw = device.zeros(Role::Gradients, product * product);
    Box::new(move |device| device.linear_weight_gradient(&dy, &x, &mut dw, product, product, product))
}

fn head_inputs(device: &CudaDevice, sizes: &Sizes) -> (Matrix, Buffer, Vec<u32>) {
    let matrix = Matrix::new(device, sizes.vocabulary, sizes.head_inputs);
    let targets = (0..sizes.head_rows).map(|row| (row * 9973 % sizes.vocabulary) as u32).collect();
    (matrix, active(device, sizes.head_rows * sizes.head_inputs), targets)
}

fn head(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let (matrix, hidden, targets) = head_inputs(device, sizes);
    Box::new(move |device| {
        device.head(&hidden, matrix.linear(), &targets, 1.0);
    })
}

fn head_backward(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let (matrix, hidden, targets) = head_inputs(device, sizes);
    let cotangents = Cotangents { log_probs: vec![-1.0 / targets.len() as f32; targets.len()], entropies: None };
    let mut dhidden = empty(device, sizes.head_rows * sizes.head_inputs);
    let mut dweights = device.zeros(Role::Gradients, sizes.vocabulary * sizes.head_inputs);
    Box::new(move |device| {
        device.head_backward(&hidden, matrix.linear(), &targets, 1.0, &cotangents, &mut dhidden, &mut dweights);
    })
}

fn head_sample(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let (matrix, hidden, targets) = head_inputs(device, sizes);
    let uniforms: Vec<f64> = (0..targets.len()).map(|row| (row as f64 + 0.5) / targets.len() as f64).collect();
    let sampleable = sizes.vocabulary;
    Box::new(move |device| {
        device.head_sample(&hidden, matrix.linear(), 1.0, &uniforms, sampleable);
    })
}

fn rms_norm(device: &CudaDevice, &Sizes { rows, width, .. }: &Sizes) -> Operation {
    let (x, weight, mut y) = (active(device, rows * width), drawn(device, Role::Weights, width), empty(device, rows * width));
    Box::new(move |device| device.rms_norm(&x, &weight, EPSILON, rows, width, &mut y))
}

fn add_rms_norm(device: &CudaDevice, &Sizes { rows, width, .. }: &Sizes) -> Operation {
    let [x, branch] = [(); 2].map(|()| active(device, rows * width));
    let [mut sum, mut y] = [(); 2].map(|()| empty(device, rows * width));
    let weight = drawn(device, Role::Weights, width);
    Box::new(move |device| device.add_rms_norm(&x, &branch, &weight, EPSILON, rows, width, &mut sum, &mut y))
}

fn rms_norm_backward(device: &CudaDevice, &Sizes { rows, width, .. }: &Sizes) -> Operation {
    let [dy, x, mut dx] = [(); 3].map(|()| active(device, rows * width));
    let (weight, mut dweight) = (drawn(device, Role::Weights, width), device.zeros(Role::Gradients, width));
    Box::new(move |device| device.rms_norm_backward(&dy, &x, &weight, EPSILON, rows, width, &mut dx, &mut dweight))
}

/// What rotations share: norms of queries and keys, a table, and every row at a position of its own.
struct Rotating {
    norms: [Buffer; 2],
    table: Buffer,
    positions: Vec<usize>,
    heads: Heads,
}
impl Rotating {
    fn new(device: &CudaDevice, &Sizes { rows, heads, .. }: &Sizes) -> Rotating {
        Rotating {
            norms: [(); 2].map(|()| drawn(device, Role::Weights, heads.head_dim)),
            table: drawn(device, Role::Statistics, rows * heads.head_dim),
            positions: (0..rows).collect(),
            heads,
        }
    }
    fn rotation(&self) -> Rotation<'_, CudaDevice> {
        let query_key_norms = Some((&self.norms[0], &self.norms[1]));
        let (table, positions) = (&self.table, &self.positions[..]);
        Rotation { heads: self.heads, bias: None, query_key_norms, norm_epsilon: EPSILON, table, positions }
    }
}

fn rotate(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let (rotating, length) = (Rotating::new(device, sizes), sizes.rows * sizes.heads.projected_width());
    let (projected, mut rotated) = (active(device, length), empty(device, length));
    Box::new(move |device| device.rotate(&projected, &rotating.rotation(), &mut rotated))
}

fn rotate_backward(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let (rotating, length) = (Rotating::new(device, sizes), sizes.rows * sizes.heads.projected_width());
    let [projected, mut gradient] = [(); 2].map(|()| active(device, length));
    let [mut query, mut key] = [(); 2].map(|()| device.zeros(Role::Gradients, sizes.heads.head_dim));
    Box::new(move |device| {
        let weights = RotationGradients { bias: None, query_key_norms: Some((&mut query, &mut key)) };
        device.rotate_backward(&projected, &rotating.rotation(), &mut gradient, weights);
    })
}

fn sum_of_squares(device: &CudaDevice, sizes: &Sizes) -> Operation {
    let values = drawn(device, Role::Gradients, sizes.rows * sizes.width);
    Box::new(move |device| {
        device.sum_of_squares(&values);
    })
}

fn swiglu(device: &CudaDevice, &Sizes { rows, width, .. }: &Sizes) -> Operation {
    let (gate_up, mut y) = (active(device, 2 * rows * width), empty(device, rows * width));
    Box::new(move |device| device.swiglu(&gate_up, rows, width, &mut y))
}

fn swiglu_backward(device: &CudaDevice, &Sizes { rows, width, .. }: &Sizes) -> Operation {
    let (dy, mut gate_up, mut y) = (active(device, rows * width), active(device, 2 * rows * width), empty(device, rows * width));
    Box::new(move |device| device.swiglu_backward(&dy, &mut gate_up, rows, width, &mut y))
}
