//! Every operation on the emulated GPU, coarsely against the CPU: that the right kernel runs over the right memory. How exact the
//! kernels are, on which shapes and under which schedules, is the business of `tests/kernels`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{CudaDevice, DeviceError, DeviceFailure, EmulatorSettings, Purpose};
use crate::device::{
    AdamWStep, AttendedRows, AttentionPlan, Cotangents, CpuDevice, Device, GemmLibrary, Heads, LinearWeights, ModelSizes, Role,
    Rotation, RotationGradients, Span,
};

/// What an operation gave, in f32.
type Results = Vec<Vec<f32>>;

fn emulated() -> CudaDevice {
    CudaDevice::emulated(&EmulatorSettings::default(), 0).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs `work` on the emulated GPU; what ends a run is a failed test here.
fn on_the_emulated_gpu<T>(work: impl FnOnce(&CudaDevice) -> T) -> T {
    let device = emulated();
    catch_unwind(AssertUnwindSafe(|| work(&device))).unwrap_or_else(|payload| match payload.downcast::<DeviceFailure>() {
        Ok(failure) => panic!("{failure}"),
        Err(payload) => std::panic::resume_unwind(payload),
    })
}

/// Relative difference in the Euclidean norm, of each result.
#[track_caller]
fn assert_close(expected: &Results, found: &Results, tolerance: f64) {
    assert_eq!(expected.len(), found.len());
    for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
        assert_eq!(expected.len(), found.len(), "result {index}");
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
        let difference = norm(&mut expected.iter().zip(found).map(|(a, b)| (a - b) as f64));
        let size = norm(&mut expected.iter().map(|&a| a as f64));
        assert!(difference <= tolerance * size, "result {index} differs by {difference:.3e} of {size:.3e}");
    }
}

macro_rules! agrees_with_the_cpu {
    ($($test:ident: $operation:path, $tolerance:expr;)*) => {$(
        #[test]
        fn $test() {
            let expected = $operation(&CpuDevice::new());
            let found = on_the_emulated_gpu(|device| $operation(device));
            assert_close(&expected, &found, $tolerance);
        }
    )*};
}

// bf16 has 8 bits: results rounded once differ by about 2^-9 = 0.002 on average.
agrees_with_the_cpu! {
    buffers_hold_what_was_written: buffers, 0.003;
    linear_layers_multiply: linear_layers, 0.005;
    embeddings_are_looked_up_and_their_gradients_collected: embeddings, 0.005;
    rows_are_normed: norms, 0.01;
    heads_are_rotated_with_bias: rotation_with_bias, 0.01;
    heads_are_rotated_with_norms: rotation_with_norms, 0.01;
    attention_attends: attention, 0.02;
    gates_open: gates, 0.01;
    the_head_scores: head, 0.02;
    weights_step: optimizer, 1e-5;
}

/// Numbers in [-1, 1) that bf16 holds exactly, so that both devices begin with the same.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        half::bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0).to_f32()
    };
    (0..count).map(|_| next()).collect()
}

fn activations<D: Device>(device: &D, seed: u32, count: usize) -> D::Buffer {
    device.upload(Role::Activations, &numbers(seed, count))
}

fn empty<D: Device>(device: &D, count: usize) -> D::Buffer {
    device.zeros(Role::Activations, count)
}

fn all<D: Device>(device: &D, buffer: &D::Buffer) -> Vec<f32> {
    device.read(buffer, 0, device.length(buffer))
}

fn buffers<D: Device>(device: &D) -> Results {
    let mut x = device.zeros(Role::Statistics, 20);
    device.write(&mut x, 3, &numbers(1, 10));
    device.scale(&mut x, 3.0);
    let mut y = activations(device, 2, 40);
    device.copy(&x, &mut y, 20);
    device.clear(&mut x, 5);
    let mut gathered = empty(device, 24);
    device.gather_rows(&y, &[4, 0, 2], 8, &mut gathered);
    let mut scattered = activations(device, 3, 40);
    device.scatter_rows(&gathered, &[1, 3, 0], 8, &mut scattered);
    vec![all(device, &x), all(device, &y), all(device, &gathered), all(device, &scattered), device.read(&y, 7, 2)]
}

fn linear_layers<D: Device>(device: &D) -> Results {
    let (outputs, inputs) = (72, 40);
    let values = device.upload(Role::Weights, &numbers(1, outputs * inputs));
    let packed = device.pack(&values, outputs, inputs);
    let weights = || LinearWeights { values: &values, packed: &packed, outputs, inputs };
    let mut results = Vec::new();
    for rows in [3, 130] {
        let x = activations(device, 2, rows * inputs);
        let dy = activations(device, 3, rows * outputs);
        let (mut y, mut dx) = (empty(device, rows * outputs), empty(device, rows * inputs));
        let mut dw = device.upload(Role::Gradients, &numbers(4, outputs * inputs));
        device.linear(&x, weights(), &mut y, rows);
        device.linear_input_gradient(&dy, weights(), &mut dx, rows);
        device.linear_weight_gradient(&dy, &x, &mut dw, rows, outputs, inputs);
        results.extend([all(device, &y), all(device, &dx), all(device, &dw)]);
    }
    results
}

fn embeddings<D: Device>(device: &D) -> Results {
    let (vocabulary, width, ids) = (11, 16, [3, 10, 3, 0, 7, 3, 10]);
    let table = device.upload(Role::Weights, &numbers(1, vocabulary * width));
    let mut x = empty(device, ids.len() * width);
    device.embed(&table, None, &ids, width, &mut x);
    let mut dtable = device.upload(Role::Gradients, &numbers(2, vocabulary * width));
    device.embed_backward(&activations(device, 3, ids.len() * width), &ids, width, &mut dtable);
    vec![all(device, &x), all(device, &dtable)]
}

fn norms<D: Device>(device: &D) -> Results {
    let (rows, width, epsilon) = (37, 64, 1e-6);
    let weight = device.upload(Role::Weights, &numbers(1, width));
    let (x, branch) = (activations(device, 2, rows * width), activations(device, 3, rows * width));
    let (mut y, mut sum, mut z) = (empty(device, rows * width), empty(device, rows * width), empty(device, rows * width));
    device.rms_norm(&x, &weight, epsilon, rows, width, &mut y);
    device.add_rms_norm(&x, &branch, &weight, epsilon, rows, width, &mut sum, &mut z);
    let mut dx = activations(device, 4, rows * width);
    let mut dweight = device.upload(Role::Gradients, &numbers(5, width));
    device.rms_norm_backward(&branch, &x, &weight, epsilon, rows, width, &mut dx, &mut dweight);
    vec![all(device, &y), all(device, &sum), all(device, &z), all(device, &dx), all(device, &dweight)]
}

const HEADS: Heads = Heads { query_heads: 6, key_value_heads: 2, head_dim: 32 };

fn rotation<D: Device>(device: &D, with_bias: bool) -> Results {
    let positions: Vec<usize> = (0..19).chain(5..9).collect();
    let (rows, width) = (positions.len(), HEADS.projected_width());
    let bias = device.upload(Role::Weights, &numbers(1, width));
    let norms = [2, 3].map(|seed| device.upload(Role::Weights, &numbers(seed, HEADS.head_dim)));
    let table = device.upload(Role::Statistics, &numbers(4, 19 * HEADS.head_dim));
    let rotation = Rotation {
        heads: HEADS,
        bias: with_bias.then_some(&bias),
        query_key_norms: (!with_bias).then_some((&norms[0], &norms[1])),
        norm_epsilon: 1e-6,
        table: &table,
        positions: &positions,
    };
    let projected = activations(device, 5, rows * width);
    let mut rotated = empty(device, rows * width);
    device.rotate(&projected, &rotation, &mut rotated);
    let mut gradient = activations(device, 6, rows * width);
    let mut dbias = device.zeros(Role::Gradients, width);
    let [mut dquery, mut dkey] = [7, 8].map(|seed| device.upload(Role::Gradients, &numbers(seed, HEADS.head_dim)));
    let gradients = RotationGradients {
        bias: with_bias.then_some(&mut dbias),
        query_key_norms: (!with_bias).then_some((&mut dquery, &mut dkey)),
    };
    device.rotate_backward(&projected, &rotation, &mut gradient, gradients);
    [rotated, gradient, dbias, dquery, dkey].iter().map(|buffer| all(device, buffer)).collect()
}

fn rotation_with_bias<D: Device>(device: &D) -> Results {
    rotation(device, true)
}
fn rotation_with_norms<D: Device>(device: &D) -> Results {
    rotation(device, false)
}

fn attention<D: Device>(device: &D) -> Results {
    let spans = [Span { start: 0, length: 70 }, Span { start: 70, length: 1 }, Span { start: 71, length: 9 }];
    let rows = 80;
    let mut caches = spans.map(|_| device.new_key_values(HEADS));
    let mut results = Vec::new();
    let rotated = activations(device, 1, rows * HEADS.projected_width());
    let mut output = empty(device, rows * HEADS.query_width());
    let mut log_sum_exp = device.zeros(Role::Statistics, rows * HEADS.query_heads);
    device.attention(&rotated, HEADS, &spans, &mut caches.each_mut(), &mut output, Some(&mut log_sum_exp));
    results.extend([all(device, &output), all(device, &log_sum_exp)]);
    let mut drotated = empty(device, rows * HEADS.projected_width());
    let doutput = activations(device, 2, rows * HEADS.query_width());
    let (plan, heads) = (AttentionPlan::whole(&spans.map(|span| span.length)), 0..HEADS.key_value_heads);
    let numbers = plan.blocks * AttentionPlan::block_numbers(HEADS.key_value_heads, HEADS.head_dim);
    let mut blocks = device.zeros(Role::Activations, numbers);
    device.write_key_blocks(&rotated, HEADS, heads.clone(), &plan, &mut blocks);
    let mut delta = device.zeros(Role::Statistics, rows * HEADS.query_heads);
    device.attention_delta(&doutput, &output, HEADS, rows, &mut delta);
    results.push(all(device, &delta));
    let attended = AttendedRows { rotated: &rotated, doutput: &doutput, log_sum_exp: &log_sum_exp, delta: &delta };
    let none = device.zeros(Role::Activations, 0);
    device.block_attention_backward(attended, HEADS, heads, &plan, &blocks, &none, &mut drotated);
    results.push(all(device, &drotated));
    // The same sequences go on, one of them as a copy, by few rows and by many.
    let mut continued = [caches[0].clone(), caches[1].clone()];
    let spans = [Span { start: 0, length: 2 }, Span { start: 2, length: 67 }];
    let rotated = activations(device, 3, 69 * HEADS.projected_width());
    device.attention(&rotated, HEADS, &spans, &mut continued.each_mut(), &mut output, None);
    results.push(device.read(&output, 0, 69 * HEADS.query_width()));
    device.clear_key_values(&mut continued[0]);
    device.attention(&rotated, HEADS, &spans[..1], &mut [&mut continued[0]], &mut output, None);
    results.push(device.read(&output, 0, 2 * HEADS.query_width()));
    results
}

fn gates<D: Device>(device: &D) -> Results {
    let (rows, width) = (9, 48);
    let mut gate_up = activations(device, 1, rows * 2 * width);
    let (mut y, mut again) = (empty(device, rows * width), empty(device, rows * width));
    device.swiglu(&gate_up, rows, width, &mut y);
    device.swiglu_backward(&activations(device, 2, rows * width), &mut gate_up, rows, width, &mut again);
    vec![all(device, &y), all(device, &again), all(device, &gate_up)]
}

fn head<D: Device>(device: &D) -> Results {
    let (vocabulary, inputs, targets, temperature) = (77, 64, [5, 76, 0, 33, 5], 0.7);
    let values = device.upload(Role::Weights, &numbers(1, vocabulary * inputs));
    let packed = device.pack(&values, vocabulary, inputs);
    let weights = || LinearWeights { values: &values, packed: &packed, outputs: vocabulary, inputs };
    let hidden = activations(device, 2, targets.len() * inputs);
    let scores = device.head(&hidden, weights(), &targets, temperature);
    let cotangents = Cotangents { log_probs: numbers(3, targets.len()), entropies: Some(numbers(4, targets.len())) };
    let mut dhidden = empty(device, targets.len() * inputs);
    let mut dweights = device.upload(Role::Gradients, &numbers(5, vocabulary * inputs));
    device.head_backward(&hidden, weights(), &targets, temperature, &cotangents, &mut dhidden, &mut dweights);
    let uniforms: Vec<f64> = (0..targets.len()).map(|row| row as f64 / 5.0 + 0.05).collect();
    let sampled = device.head_sample(&hidden, weights(), temperature, &uniforms, vocabulary - 7);
    let (tokens, log_probs): (Vec<u32>, Vec<f32>) = sampled.into_iter().unzip();
    assert_eq!(device.head(&hidden, weights(), &tokens, temperature).log_probs, log_probs, "sampled and scored bits");
    let greedy = device.head_sample(&hidden, weights(), 0.0, &uniforms, vocabulary);
    vec![
        scores.log_probs,
        scores.entropies,
        all(device, &dhidden),
        all(device, &dweights),
        tokens.iter().map(|&token| token as f32).collect(),
        log_probs,
        greedy.iter().flat_map(|&(token, log_prob)| [token as f32, log_prob]).collect(),
    ]
}

fn optimizer<D: Device>(device: &D) -> Results {
    let (outputs, inputs) = (33, 24);
    let length = outputs * inputs;
    let mut weights = device.upload(Role::Weights, &numbers(1, length));
    let mut packed = device.pack(&weights, outputs, inputs);
    let gradient = device.upload(Role::Gradients, &numbers(2, length));
    let mut first = device.upload(Role::Optimizer, &numbers(3, length));
    let mut second = device.upload(Role::Optimizer, &numbers(4, length).iter().map(|x| x.abs()).collect::<Vec<_>>());
    let step = AdamWStep {
        learning_rate: 0.01,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 3,
        gradient_scale: 0.5,
    };
    device.adamw(&mut weights, Some(&mut packed), &gradient, &mut first, &mut second, step);
    vec![all(device, &weights), all(device, &first), all(device, &second), vec![device.sum_of_squares(&gradient) as f32]]
}

#[test]
fn products_read_the_copy_that_the_optimizer_refreshes() {
    on_the_emulated_gpu(|device| {
        let (outputs, inputs) = (16, 16);
        let mut values = device.upload(Role::Weights, &vec![1.0; outputs * inputs]);
        let mut packed = device.pack(&values, outputs, inputs);
        let gradient = device.upload(Role::Gradients, &vec![1.0; outputs * inputs]);
        let (mut first, mut second) = (device.zeros(Role::Optimizer, 256), device.zeros(Role::Optimizer, 256));
        let step = AdamWStep {
            learning_rate: 0.5,
            beta1: 0.0,
            beta2: 0.0,
            epsilon: 0.0,
            weight_decay: 0.0,
            step: 1,
            gradient_scale: 1.0,
        };
        device.adamw(&mut values, Some(&mut packed), &gradient, &mut first, &mut second, step);
        let x = device.upload(Role::Activations, &vec![1.0; inputs]);
        let mut y = device.zeros(Role::Activations, outputs);
        device.linear(&x, LinearWeights { values: &values, packed: &packed, outputs, inputs }, &mut y, 1);
        assert_eq!(all(device, &y), vec![8.0; outputs]);
    });
}

#[test]
fn cublaslt_gives_the_same_products() {
    let expected = linear_layers(&CpuDevice::new());
    let found = on_the_emulated_gpu(|device| {
        let device = device.clone().with_gemm(GemmLibrary::CublasLt).unwrap_or_else(|error| panic!("{error}"));
        linear_layers(&device)
    });
    assert_close(&expected, &found, 0.005);
}

#[test]
fn decoding_in_pieces_gives_the_bits_of_the_whole_sequence() {
    on_the_emulated_gpu(|device| {
        let device = device.clone().with_attention_segment(64);
        let (rows, width) = (150, HEADS.projected_width());
        let values = numbers(1, rows * width);
        let mut whole = empty(&device, rows * HEADS.query_width());
        let attend = |first: usize, length: usize, cache: &mut super::PagedKeyValues, output: &mut super::Buffer| {
            let rotated = device.upload(Role::Activations, &values[first * width..(first + length) * width]);
            device.attention(&rotated, HEADS, &[Span { start: 0, length }], &mut [cache], output, None);
            device.read(output, 0, length * HEADS.query_width())
        };
        let expected = attend(0, rows, &mut device.new_key_values(HEADS), &mut whole);
        let mut cache = device.new_key_values(HEADS);
        let mut found = Vec::new();
        for (first, length) in [(0, 100), (100, 5), (105, 1), (106, 23), (129, 21)] {
            found.extend(attend(first, length, &mut cache, &mut whole));
        }
        assert_eq!(expected, found);
    });
}

#[test]
fn memory_is_counted_by_purpose_and_given_back() {
    let device = emulated();
    let in_use = |purpose: Purpose| device.allocations()[purpose as usize].in_use;
    let buffer = device.zeros(Role::Gradients, 1000);
    assert_eq!((in_use(Purpose::Gradients), in_use(Purpose::Weights)), (4000, 0));
    drop(buffer);
    let table = &device.allocations()[Purpose::Gradients as usize];
    assert_eq!((table.purpose, table.in_use, table.peak), (Purpose::Gradients, 0, 4000));
}

#[test]
fn too_much_memory_is_refused_with_the_table() {
    let device = emulated();
    let _held = device.zeros(Role::Weights, 1 << 20);
    let payload = catch_unwind(AssertUnwindSafe(|| device.zeros(Role::Activations, 1 << 40))).err().expect("2 TiB do not exist");
    let failure = payload.downcast::<DeviceFailure>().expect("a failure of the device").0;
    assert!(failure.contains("no room for 2199.0 GB of activations") && failure.contains("weights 4 MB"), "{failure}");
}

#[test]
fn sizes_that_the_kernels_cannot_run_are_named() {
    let device = emulated();
    let heads = |query_heads, key_value_heads, head_dim| Heads { query_heads, key_value_heads, head_dim };
    let sizes = |heads, hidden, intermediate| ModelSizes { heads, hidden, intermediate, vocabulary: 151_936 };
    assert_eq!(device.check_sizes(sizes(heads(14, 2, 64), 896, 4864)), Ok(()));
    for (heads, hidden, intermediate, name) in [
        (heads(14, 2, 48), 896, 4864, "head_dim"),
        (heads(32, 2, 64), 896, 4864, "num_attention_heads"),
        (heads(14, 2, 64), 900, 4864, "hidden_size"),
        (heads(14, 2, 64), 896, 4868, "intermediate_size"),
    ] {
        let error = device.check_sizes(sizes(heads, hidden, intermediate)).expect_err(name);
        assert!(error.contains(name) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn a_process_with_emulated_gpus_gets_no_real_one() {
    let _device = emulated();
    assert!(matches!(CudaDevice::open(0), Err(DeviceError::OtherKindInUse(_))));
    let error = CudaDevice::emulated(&EmulatorSettings::default(), 99).err().expect("there is one device").to_string();
    assert!(error.contains("no device 99") && !error.contains('\n'), "{error}");
}
