//! Functions of cuda/include with two bodies, on a GPU and on the emulated one, against what the PTX ISA documents. On a real GPU
//! this is what proves the emulator's model: fragment layouts, rounding, zero fill, swizzles.

use cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr};

use crate::inputs::Inputs;
use crate::raw::Gpu;
use crate::reference::Precision;
use crate::subject::{Emulated, is_real, settings};

const WARP: usize = 32;

/// The structs of arguments of cuda/probes.cu are all pointers, with at most one number at the end.
#[repr(C)]
#[derive(Clone, Copy)]
struct Words<const N: usize>([u64; N]);
// SAFETY: plain numbers, laid out as the structs in cuda/include/arguments.h.
unsafe impl<const N: usize> DeviceRepr for Words<N> {}

/// Runs `test` with the kernels of this binary on the GPU under test, in each schedule of an emulated one.
fn on_probed_gpu(test: impl Fn(&Gpu)) {
    let images: Vec<&[u8]> = learner::device::cuda::kernel_images(is_real()).iter().map(|(_, image)| *image).collect();
    let open = || Gpu::open(&images);
    if is_real() {
        learner::device::CudaDevice::open(0).unwrap_or_else(|error| panic!("{error}"));
        return test(&open());
    }
    let Some(emulated) = Emulated::take() else { return };
    for run in 0..4 {
        emulated.configure(&settings(run));
        test(&open());
        emulated.expect_no_findings();
    }
}

fn address<T>(gpu: &Gpu, slice: &CudaSlice<T>) -> u64 {
    slice.device_ptr(&gpu.stream).0
}

#[track_caller]
fn launch<const N: usize>(gpu: &Gpu, kernel: &str, arguments: [u64; N]) {
    gpu.launch(kernel, &Words(arguments)).unwrap_or_else(|error| panic!("{kernel}: {error}"));
}

fn bf16_bits(value: f32) -> u32 {
    u32::from(half::bf16::from_f32(value).to_bits())
}

fn bf16_value(bits: u32) -> f32 {
    f32::from_bits(bits << 16)
}

#[test]
fn numbers_are_rounded_as_documented() {
    let special = [0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, 1e-30, -87.0, 88.0, 1.0 + f32::EPSILON];
    // Halfway between two bf16, above an even and above an odd one: 1 + 2^-8 and 1 + 3 * 2^-8.
    let ties = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -1.0 - 1.0 / 256.0];
    let mut x: Vec<f32> = special.iter().chain(&ties).copied().collect();
    x.extend(Inputs::new("probed numbers").wide(83, 3.0).iter().map(|value| (value * 1.000_123) as f32));
    let y: Vec<f32> = x.iter().rev().copied().collect();
    on_probed_gpu(|gpu| {
        let (count, width) = (x.len(), 8);
        let (from_x, from_y) = (gpu.upload(&x), gpu.upload(&y));
        let (packed, results) = (gpu.upload(&vec![0u32; count]), gpu.upload(&vec![0f32; count * width]));
        let places = [address(gpu, &from_x), address(gpu, &from_y), address(gpu, &packed), address(gpu, &results), count as u64];
        launch(gpu, "probe_numbers", places);
        let (packed, results) = (gpu.download(&packed), gpu.download(&results));
        for (i, (&x, &y)) in x.iter().zip(&y).enumerate() {
            assert_eq!(packed[i], bf16_bits(x) | bf16_bits(y) << 16, "pack({x:e}, {y:e})");
            let found = &results[i * width..][..width];
            let wide = f64::from(x);
            // ex2.approx.ftz: 2 units in the last place; the others as the CUDA programming guide bounds them.
            let product = x * y;
            for (name, found, exact, units) in [
                ("exp2_fast", found[0], wide.exp2(), 2.0),
                ("log_precise", found[1], wide.ln(), 2.0),
                ("exp_precise", found[2], wide.exp(), 2.0),
                ("expm1_precise", found[3], wide.exp_m1(), 2.0),
                ("square_root", found[4], wide.sqrt(), 0.5),
                ("multiply_add", found[5], wide * f64::from(y) - f64::from(product), 0.5),
                ("product", found[7], wide * f64::from(y), 0.5),
            ] {
                let rounded = exact as f32;
                let near = (f64::from(found) - exact).abs() <= units * f64::from(f32::EPSILON) * exact.abs();
                let tiny = exact.abs() < f64::from(f32::MIN_POSITIVE) && found.abs() <= f32::MIN_POSITIVE;
                let same = found == rounded || (found.is_nan() && rounded.is_nan());
                assert!(near || tiny || same, "{name} of ({x:e}, {y:e}) is {found:e}, exactly {exact:e}");
            }
            assert_eq!(found[6], x.max(y), "maximum({x:e}, {y:e})");
        }
    });
}

/// What the butterfly over groups of `width` lanes gives lane `lane`: partners at distance 1, then 2, then 4 ...
fn butterfly(values: &[f32], width: usize, combine: fn(f32, f32) -> f32) -> Vec<f32> {
    let mut values = values.to_vec();
    let mut mask = 1;
    while mask < width {
        values = (0..values.len()).map(|lane| combine(values[lane], values[lane ^ mask])).collect();
        mask *= 2;
    }
    values
}

#[test]
fn lanes_exchange_and_sum_in_the_stated_order() {
    let mut inputs = Inputs::new("probed lanes");
    let values: Vec<f32> = inputs.wide(128, 1.0).iter().map(|value| (value * 1.000_123) as f32).collect();
    let from: Vec<i32> = (0..WARP).map(|lane| ((lane * 7 + 3) % WARP) as i32).collect();
    on_probed_gpu(|gpu| {
        let (given, asked) = (gpu.upload(&values[..WARP]), gpu.upload(&from));
        let outputs = [WARP, 5 * WARP, 5 * WARP, 5 * WARP].map(|length| gpu.upload(&vec![0f32; length]));
        let [a, b, c, d] = [0, 1, 2, 3].map(|index| address(gpu, &outputs[index]));
        launch(gpu, "probe_warp", [address(gpu, &given), address(gpu, &asked), a, b, c, d]);
        let [shuffled, exchanged, sums, maxima] = outputs.map(|output| gpu.download(&output));
        let warp = &values[..WARP];
        assert_eq!(shuffled, from.iter().map(|&lane| warp[lane as usize]).collect::<Vec<_>>());
        for step in 0..5 {
            let part = |all: &[f32]| all[step * WARP..][..WARP].to_vec();
            assert_eq!(part(&exchanged), (0..WARP).map(|lane| warp[lane ^ (1 << step)]).collect::<Vec<_>>());
            assert_eq!(part(&sums), butterfly(warp, 2 << step, |a, b| a + b), "sums over {}", 2 << step);
            assert_eq!(part(&maxima), butterfly(warp, 2 << step, f32::max), "maxima over {}", 2 << step);
        }
        let given = gpu.upload(&values);
        let outputs = [128, 128].map(|length| gpu.upload(&vec![0f32; length]));
        launch(gpu, "probe_block", [address(gpu, &given), address(gpu, &outputs[0]), address(gpu, &outputs[1])]);
        let warps: Vec<f32> = values.chunks_exact(WARP).map(|warp| butterfly(warp, WARP, |a, b| a + b)[0]).collect();
        let sum = warps.iter().skip(1).fold(warps[0], |sum, warp| sum + warp);
        let maximum = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert_eq!(gpu.download(&outputs[0]), vec![sum; 128]);
        assert_eq!(gpu.download(&outputs[1]), vec![maximum; 128]);
    });
}

#[test]
fn vector_accesses_move_every_word() {
    let from: Vec<u32> = (0..128).map(|i| bf16_bits(i as f32 * 0.5) | bf16_bits(-(i as f32)) << 16).collect();
    on_probed_gpu(|gpu| {
        let (given, to) = (gpu.upload(&from), gpu.upload(&vec![0u32; 5 * 128]));
        launch(gpu, "probe_memory", [address(gpu, &given), address(gpu, &to)]);
        for (copy, words) in gpu.download(&to).chunks_exact(128).enumerate() {
            assert_eq!(words, &from[..], "copy {copy}");
        }
    });
}

#[test]
fn copies_fill_the_rest_of_a_chunk_with_zeros() {
    let from: Vec<u32> = (0..128u32).map(|i| 0x0101_0101 * (i + 1)).collect();
    let bytes: Vec<i32> = (0..WARP as i32).map(|lane| lane % 17).collect();
    on_probed_gpu(|gpu| {
        let (given, counts, to) = (gpu.upload(&from), gpu.upload(&bytes), gpu.upload(&vec![7u32; 128]));
        launch(gpu, "probe_copies", [address(gpu, &given), address(gpu, &counts), address(gpu, &to)]);
        let found: Vec<u8> = gpu.download(&to).iter().flat_map(|word| word.to_le_bytes()).collect();
        let source: Vec<u8> = from.iter().flat_map(|word| word.to_le_bytes()).collect();
        for (lane, &count) in bytes.iter().enumerate() {
            let mut expected = source[16 * lane..][..16].to_vec();
            expected[count as usize..].fill(0);
            assert_eq!(&found[16 * lane..][..16], &expected[..], "lane {lane}, {count} bytes");
        }
    });
}

#[test]
fn matrices_are_loaded_as_the_fragment_layout_says() {
    let matrix: Vec<u16> = (0..64 * 8).map(|i| i as u16).collect();
    let rows: Vec<i32> = (0..2 * WARP).map(|i| ((i * 29 + 5) % 64) as i32).collect();
    on_probed_gpu(|gpu| {
        let (given, pointed) = (gpu.upload(&matrix), gpu.upload(&rows));
        let outputs = [0, 1].map(|_| gpu.upload(&vec![0u32; WARP * 2 * 4]));
        let [plain, transposed] = [0, 1].map(|index| address(gpu, &outputs[index]));
        launch(gpu, "probe_matrices", [address(gpu, &given), address(gpu, &pointed), plain, transposed]);
        let [plain, transposed] = outputs.map(|output| gpu.download(&output));
        for (index, lane) in (0..2 * 4 * WARP).map(|i| (i % 8, i / 8)) {
            let (call, which) = (index / 4, index % 4);
            let (group, member) = (lane / 4, lane % 4);
            // Row r of matrix `which` is the one that lane 8 * which + r points at.
            let element =
                |row: usize, column: usize| u32::from(matrix[rows[call * WARP + 8 * which + row] as usize * 8 + column]);
            let place = (lane * 2 + call) * 4 + which;
            assert_eq!(plain[place], element(group, 2 * member) | element(group, 2 * member + 1) << 16, "lane {lane}");
            let expected = element(2 * member, group) | element(2 * member + 1, group) << 16;
            assert_eq!(transposed[place], expected, "lane {lane}, transposed");
        }
    });
}

#[test]
fn tensor_cores_multiply_fragments_as_their_layout_says() {
    let mut inputs = Inputs::new("probed products");
    // A: two tiles of 16 x 16; B: three of 16 x 8 (k, n); C: 2 x 3 of 16 x 8.
    let (a, b) = (inputs.normal(2 * 16 * 16, 1.0), inputs.normal(3 * 16 * 8, 1.0));
    let c = inputs.normal(2 * 3 * 16 * 8, 4.0);
    let pair = |low: f32, high: f32| bf16_bits(low) | bf16_bits(high) << 16;
    let lanes = || (0..WARP).map(|lane| (lane / 4, lane % 4));
    let mut a_fragments = Vec::new();
    let mut b_fragments = Vec::new();
    let mut c_fragments = Vec::new();
    for (group, member) in lanes() {
        for tile in a.chunks_exact(256) {
            for (row, column) in
                [(group, 2 * member), (group + 8, 2 * member), (group, 8 + 2 * member), (group + 8, 8 + 2 * member)]
            {
                a_fragments.push(pair(tile[row * 16 + column], tile[row * 16 + column + 1]));
            }
        }
        for tile in b.chunks_exact(128) {
            for k in [2 * member, 8 + 2 * member] {
                b_fragments.push(pair(tile[k * 8 + group], tile[(k + 1) * 8 + group]));
            }
        }
        for tile in c.chunks_exact(128) {
            for (row, column) in c_places(group, member) {
                c_fragments.push(tile[row * 8 + column]);
            }
        }
    }
    on_probed_gpu(|gpu| {
        let (given_a, given_b, given_c) = (gpu.upload(&a_fragments), gpu.upload(&b_fragments), gpu.upload(&c_fragments));
        let result = gpu.upload(&vec![0f32; c_fragments.len()]);
        let arguments = [address(gpu, &given_a), address(gpu, &given_b), address(gpu, &given_c), address(gpu, &result)];
        launch(gpu, "probe_multiply", arguments);
        let result = gpu.download(&result);
        let mut place = 0;
        for (group, member) in lanes() {
            for (m, a) in a.chunks_exact(256).enumerate() {
                for (n, b) in b.chunks_exact(128).enumerate() {
                    for (row, column) in c_places(group, member) {
                        let before = f64::from(c[(m * 3 + n) * 128 + row * 8 + column]);
                        let terms = (0..16).map(|k| f64::from(a[row * 16 + k]) * f64::from(b[k * 8 + column]));
                        let size = before.abs() + terms.clone().map(f64::abs).sum::<f64>();
                        let exact = before + terms.sum::<f64>();
                        // A tensor core may truncate where it aligns terms: some units of the largest.
                        let error = (f64::from(result[place]) - exact).abs();
                        assert!(
                            error <= 16.0 * f64::from(f32::EPSILON) * size,
                            "({m}, {n}) [{row}, {column}] is off by {error:e}"
                        );
                        place += 1;
                    }
                }
            }
        }
    });
}

/// Row and column of each of the four accumulators of a lane.
fn c_places(group: usize, member: usize) -> [(usize, usize); 4] {
    [(group, 2 * member), (group, 2 * member + 1), (group + 8, 2 * member), (group + 8, 2 * member + 1)]
}

#[test]
fn tiles_place_chunks_free_of_conflicts() {
    on_probed_gpu(|gpu| {
        let outputs = [4, 8, 16].map(|chunks| gpu.upload(&vec![-1i32; 64 * chunks]));
        let [a, b, c] = [0, 1, 2].map(|index| address(gpu, &outputs[index]));
        launch(gpu, "probe_tile", [a, b, c]);
        for (output, chunks) in outputs.iter().zip([4, 8, 16]) {
            let offsets = gpu.download(output);
            let mut places: Vec<i32> = offsets.clone();
            places.sort_unstable();
            assert_eq!(places, (0..64 * chunks as i32).map(|place| place * 8).collect::<Vec<_>>(), "{chunks} chunks");
            // Eight rows of one chunk column, as ldmatrix reads them, lie in eight different groups of four banks.
            for (first, chunk) in (0..64).step_by(8).flat_map(|first| (0..chunks).map(move |chunk| (first, chunk))) {
                let groups: std::collections::BTreeSet<i32> =
                    (first..first + 8).map(|row| offsets[row * chunks + chunk] / 8 % 8).collect();
                assert_eq!(groups.len(), 8, "{chunks} chunks, rows from {first}, chunk {chunk}");
            }
        }
    });
}

#[test]
fn bf16_on_the_host_is_the_same_rounding() {
    for value in [1.0f32 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 3.3e38, 1e-40, -0.1] {
        assert_eq!(f64::from(bf16_value(bf16_bits(value))), Precision::Bf16.stored(f64::from(value)));
    }
}
