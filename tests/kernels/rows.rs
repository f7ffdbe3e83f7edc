//! Operations of each row by itself: moves, embedding, norms, rotation, SwiGLU.

use learner::device::{Heads, LinearWeights, Role, Rotation, RotationGradients};

use crate::accept::{Claim, assert_same_bits};
use crate::inputs::{Inputs, heads};
use crate::reference::{self, Precision, wide};
use crate::subject::{Subject, Testable, activations, all, on_every_device};

on_every_device!(
    buffers_hold_what_was_written,
    rows_gathered_and_scattered,
    buffers_accumulate,
    parts_copied,
    bytes_of_a_number,
    embedding_with_repeated_ids,
    embedding_of_a_table_that_arrived,
    norms,
    norm_rows_do_not_depend_on_how_many_there_are,
    rotation,
    rotated_rows_do_not_depend_on_how_many_there_are,
    swiglu,
);

const EPSILON: f32 = 1e-6;

fn buffers_hold_what_was_written<D: Testable>(subject: &Subject<D>) {
    // Beside the edges of vectors of 4 and 8 and of a block of threads.
    for length in [1, 7, 8, 9, 255, 256, 257, 2049] {
        let mut numbers = Inputs::new("buffers");
        let (values, patch) = (numbers.normal(length, 1.0), numbers.normal(length / 2 + 1, 1.0));
        let offset = length - patch.len();
        for role in [Role::Weights, Role::Gradients, Role::Optimizer, Role::Activations, Role::Statistics] {
            let [written, cleared, copied, scaled, part] = subject.run(|device| {
                let mut buffer = device.upload(role, &values);
                device.write(&mut buffer, offset, &patch);
                let written = all(device, &buffer);
                let part = device.read(&buffer, offset, patch.len());
                let mut copied = device.zeros(role, length + 3);
                device.copy(&buffer, &mut copied, length);
                let mut scaled = device.upload(Role::Gradients, &values);
                device.scale(&mut scaled, 0.25);
                device.clear(&mut buffer, length / 2);
                [written, all(device, &buffer), all(device, &copied), all(device, &scaled), part]
            });
            let expected = [&values[..offset], &patch].concat();
            assert_same_bits("written", &written, &expected);
            assert_same_bits("part", &part, &patch);
            assert_same_bits("cleared", &cleared, &[&vec![0.0; length / 2], &expected[length / 2..]].concat());
            assert_same_bits("copied", &copied, &[&expected[..], &[0.0; 3]].concat());
            assert_same_bits("scaled", &scaled, &values.iter().map(|value| value * 0.25).collect::<Vec<_>>());
        }
    }
}

fn rows_gathered_and_scattered<D: Testable>(subject: &Subject<D>) {
    for width in [8, 24, 264] {
        let from = Inputs::new("moves").normal(9 * width, 1.0);
        let rows = [8usize, 0, 3, 5];
        let [gathered, scattered] = subject.run(|device| {
            let buffer = activations(device, &from);
            let mut gathered = device.zeros(Role::Activations, rows.len() * width);
            device.gather_rows(&buffer, &rows, width, &mut gathered);
            let mut scattered = activations(device, &vec![3.0; 9 * width]);
            device.scatter_rows(&gathered, &rows, width, &mut scattered);
            device.gather_rows(&buffer, &[], width, &mut scattered);
            [all(device, &gathered), all(device, &scattered)]
        });
        let expected: Vec<f32> = rows.iter().flat_map(|row| from[row * width..][..width].to_vec()).collect();
        assert_same_bits("gathered", &gathered, &expected);
        let row = |row: usize| if rows.contains(&row) { from[row * width..][..width].to_vec() } else { vec![3.0; width] };
        assert_same_bits("scattered", &scattered, &(0..9).flat_map(row).collect::<Vec<_>>());
    }
}

fn embedding_with_repeated_ids<D: Testable>(subject: &Subject<D>) {
    for (rows, vocabulary, width) in [(1, 3, 8), (70, 11, 24), (33, 430, 264)] {
        let mut numbers = Inputs::new("embedding");
        let (table, dtable) = (numbers.normal(vocabulary * width, 1.0), numbers.normal(vocabulary * width, 1.0));
        let (ids, dx) = (numbers.ids(rows, vocabulary), numbers.normal(rows * width, 1.0));
        let [x, found] = subject.run(|device| {
            let table = device.upload(Role::Weights, &table);
            let mut x = device.zeros(Role::Activations, rows * width);
            device.embed(&table, None, &ids, width, &mut x);
            let mut dtable = device.upload(Role::Gradients, &dtable);
            device.embed_backward(&activations(device, &dx), &ids, width, &mut dtable);
            [all(device, &x), all(device, &dtable)]
        });
        let expected: Vec<f32> = ids.iter().flat_map(|&id| table[id as usize * width..][..width].to_vec()).collect();
        assert_same_bits("x", &x, &expected);
        let mut exact = reference::embed_backward(Precision::Exact, &wide(&dx), &ids, width, vocabulary);
        exact.iter_mut().zip(wide(&dtable)).for_each(|(sum, before)| *sum += before);
        Claim { what: "dtable", width, found: &found, exact: &exact, naive: &exact }.accept_floats();
    }
}

fn buffers_accumulate<D: Testable>(subject: &Subject<D>) {
    for length in [1, 7, 257, 2049] {
        let mut numbers = Inputs::new("accumulate");
        let (from, to) = (numbers.normal(length + 3, 1.0), numbers.normal(length + 2, 1e-3));
        let [sum] = subject.run(|device| {
            let mut sum = device.upload(Role::Gradients, &to);
            device.accumulate(&device.upload(Role::Gradients, &from), &mut sum, length);
            [all(device, &sum)]
        });
        let expected: Vec<f32> = to.iter().zip(&from).map(|(to, from)| to + from).take(length).collect();
        assert_same_bits("sum", &sum, &[&expected[..], &to[length..]].concat());
    }
}

/// Between roles at multiples of what a kernel loads at once, within one anywhere; what lies around stays as it was.
fn parts_copied<D: Testable>(subject: &Subject<D>) {
    let roles = [Role::Gradients, Role::Travelling, Role::Activations];
    for length in [1, 7, 257, 2049] {
        let mut numbers = Inputs::new("parts");
        let (from, before) = (numbers.normal(length + 9, 1.0), numbers.normal(length + 19, 1.0));
        for (from_role, to_role) in roles.iter().flat_map(|&from| roles.map(|to| (from, to))) {
            let (first, place) = if from_role == to_role { (3, 7) } else { (8, 16) };
            let [found] = subject.run(|device| {
                let mut to = device.upload(to_role, &before);
                device.copy_part(&device.upload(from_role, &from), first, &mut to, place, length);
                [all(device, &to)]
            });
            let expected = [&before[..place], &from[first..][..length], &before[place + length..]].concat();
            assert_same_bits(&format!("{length} numbers of {from_role:?} in {to_role:?}"), &found, &expected);
        }
    }
}

/// What sums is f32 on every device; what travels is what products read.
fn bytes_of_a_number<D: Testable>(subject: &Subject<D>) {
    let bytes = |role| subject.once(|device: &D| device.number_bytes(&device.zeros(role, 8)));
    for role in [Role::Weights, Role::Gradients, Role::Optimizer, Role::Statistics] {
        assert_eq!(bytes(role), 4, "{role:?}");
    }
    let computed = if D::ACTIVATIONS == Precision::Exact { 4 } else { 2 };
    assert_eq!([bytes(Role::Travelling), bytes(Role::Activations)], [computed; 2]);
}

/// A matrix that arrives in more room than it needs multiplies, and is looked up, as one that was always here.
fn embedding_of_a_table_that_arrived<D: Testable>(subject: &Subject<D>) {
    let (vocabulary, width, rows) = (40, 24, 19);
    let mut numbers = Inputs::new("arrival");
    let (table, ids) = (numbers.normal(vocabulary * width, 1.0), numbers.ids(rows, vocabulary));
    let [here, here_y, arrived, arrived_y] = subject.run(|device| {
        let run = |values: &D::Buffer, packed: &D::Packed, given: Option<&D::Packed>| {
            let (mut x, mut y) =
                (device.zeros(Role::Activations, rows * width), device.zeros(Role::Activations, rows * vocabulary));
            device.embed(values, given, &ids, width, &mut x);
            let weights = LinearWeights { values, packed, outputs: vocabulary, inputs: width };
            device.linear(&x, weights, &mut y, rows);
            [all(device, &x), all(device, &y)]
        };
        let values = device.upload(Role::Weights, &table);
        let packed = device.pack(&values, vocabulary, width);
        let [here, here_y] = run(&values, &packed, None);
        let (mut values, mut packed) = device.receivable(vocabulary, width, vocabulary * width + 40);
        let arrival = device.arrival(&mut values, &mut packed);
        device.copy(&device.upload(Role::Travelling, &table), arrival, table.len());
        device.arrived(&values, &mut packed);
        let [arrived, arrived_y] = run(&values, &packed, Some(&packed));
        [here, here_y, arrived, arrived_y]
    });
    assert_same_bits("x", &arrived, &here);
    assert_same_bits("y", &arrived_y, &here_y);
}

/// Runs all of RMSNorm: `[y, sum, y of the sum, dx, dweight]`.
fn run_norms<D: Testable>(device: &D, x: &[f32], branch: &[f32], dy: &[f32], dx: &[f32], weight: &[f32]) -> [Vec<f32>; 5] {
    let (width, rows) = (weight.len(), x.len() / weight.len());
    let dweight: Vec<f32> = weight.iter().map(|w| 2.0 * w).collect();
    let weight = device.upload(Role::Weights, weight);
    let (x, branch, dy) = (activations(device, x), activations(device, branch), activations(device, dy));
    let zeros = || device.zeros(Role::Activations, rows * width);
    let (mut y, mut sum, mut sum_y, mut dx) = (zeros(), zeros(), zeros(), activations(device, dx));
    let mut dweight = device.upload(Role::Gradients, &dweight);
    device.rms_norm(&x, &weight, EPSILON, rows, width, &mut y);
    device.add_rms_norm(&x, &branch, &weight, EPSILON, rows, width, &mut sum, &mut sum_y);
    device.rms_norm_backward(&dy, &x, &weight, EPSILON, rows, width, &mut dx, &mut dweight);
    [all(device, &y), all(device, &sum), all(device, &sum_y), all(device, &dx), all(device, &dweight)]
}

fn norms<D: Testable>(subject: &Subject<D>) {
    for (rows, width, size) in [(1, 8, 1.0), (5, 64, 30.0), (70, 136, 1.0), (3, 1032, 1e-3), (2, 2056, 1.0), (2, 8200, 1.0)] {
        let mut numbers = Inputs::new("norms");
        let mut normal = |deviation| numbers.normal(rows * width, deviation);
        let (x, branch, dy, dx) = (normal(size), normal(size), normal(1.0), normal(1.0 / size));
        let weight = numbers.norm_weight(width);
        let [y, sum, sum_y, found_dx, dweight] = subject.run(|device| run_norms(device, &x, &branch, &dy, &dx, &weight));
        let (x, branch, dy, dx, weight) = (wide(&x), wide(&branch), wide(&dy), wide(&dx), wide(&weight));
        let epsilon = f64::from(EPSILON);
        let shape = format!("{rows} rows of {width}");
        let claim = |name: &str, found: &[f32], expected: &dyn Fn(Precision) -> Vec<f64>| {
            let (exact, naive) = (expected(Precision::Exact), expected(Precision::Bf16));
            Claim { what: &format!("{name}, {shape}"), width, found, exact: &exact, naive: &naive }.accept_activations::<D>();
        };
        let add = |precision: Precision, a: &[f64], b: &[f64]| -> Vec<f64> {
            a.iter().zip(b).map(|(a, b)| precision.stored(a + b)).collect()
        };
        claim("y", &y, &|precision| reference::rms_norm(precision, &x, &weight, epsilon));
        claim("sum", &sum, &|precision| add(precision, &x, &branch));
        claim("y of the sum", &sum_y, &|precision| {
            reference::rms_norm(precision, &add(precision, &x, &branch), &weight, epsilon)
        });
        claim("dx", &found_dx, &|precision| {
            add(precision, &dx, &reference::rms_norm_backward(precision, &dy, &x, &weight, epsilon).dx)
        });
        let mut exact = reference::rms_norm_backward(Precision::Exact, &dy, &x, &weight, epsilon).dweight;
        exact.iter_mut().zip(&weight).for_each(|(sum, w)| *sum += 2.0 * w);
        let what = format!("dweight, {shape}");
        Claim { what: &what, width, found: &dweight, exact: &exact, naive: &exact }.accept_floats();
    }
}

fn norm_rows_do_not_depend_on_how_many_there_are<D: Testable>(subject: &Subject<D>) {
    let (most, width) = (75, 72);
    let mut numbers = Inputs::new("rows of norms");
    let mut normal = || numbers.normal(most * width, 1.0);
    let (x, branch, dy, dx) = (normal(), normal(), normal(), normal());
    let weight = numbers.norm_weight(width);
    let run = |first: usize, rows: usize| {
        let part = |values: &[f32]| values[first * width..][..rows * width].to_vec();
        subject.run(|device| {
            let [y, sum, sum_y, dx, _] = run_norms(device, &part(&x), &part(&branch), &part(&dy), &part(&dx), &weight);
            [y, sum, sum_y, dx]
        })
    };
    let whole = run(0, most);
    for (first, rows) in [(0, 1), (74, 1), (10, 7), (5, 64)] {
        for (part, whole) in run(first, rows).iter().zip(&whole) {
            assert_same_bits(&format!("{rows} rows from {first}"), part, &whole[first * width..][..rows * width]);
        }
    }
}

/// What [`Rotation`] takes, on the host.
#[derive(Clone)]
struct RotationInputs {
    heads: Heads,
    bias: Option<Vec<f32>>,
    norms: Option<[Vec<f32>; 2]>,
    table: Vec<f32>,
    positions: Vec<usize>,
    projected: Vec<f32>,
    gradient: Vec<f32>,
}

impl RotationInputs {
    fn new(heads: Heads, rows: usize, bias: bool, norms: bool) -> RotationInputs {
        let mut numbers = Inputs::new("rotation");
        let (width, dim) = (heads.projected_width(), heads.head_dim);
        RotationInputs {
            heads,
            bias: bias.then(|| numbers.normal(width, 1.0)),
            norms: norms.then(|| [numbers.norm_weight(dim), numbers.norm_weight(dim)]),
            table: reference::rotary_table(100, dim, 10_000.0),
            positions: (0..rows).map(|row| (row * 37) % 100).collect(),
            projected: numbers.normal(rows * width, 2.0),
            gradient: numbers.normal(rows * width, 1.0),
        }
    }

    fn part(&self, first: usize, rows: usize) -> RotationInputs {
        let width = self.heads.projected_width();
        let part = |values: &[f32]| values[first * width..][..rows * width].to_vec();
        RotationInputs {
            positions: self.positions[first..first + rows].to_vec(),
            projected: part(&self.projected),
            gradient: part(&self.gradient),
            ..self.clone()
        }
    }

    /// `[rotated, dprojected, dbias, dquery_norm, dkey_norm]`, of the last three those that there are, summed onto ones.
    fn run<D: Testable>(&self, device: &D) -> [Vec<f32>; 5] {
        let (width, dim) = (self.heads.projected_width(), self.heads.head_dim);
        let weights = |values: &[f32]| device.upload(Role::Weights, values);
        let (bias, table) = (self.bias.as_deref().map(weights), device.upload(Role::Statistics, &self.table));
        let norms = self.norms.as_ref().map(|[query, key]| (weights(query), weights(key)));
        let rotation = Rotation {
            heads: self.heads,
            bias: bias.as_ref(),
            query_key_norms: norms.as_ref().map(|(query, key)| (query, key)),
            norm_epsilon: EPSILON,
            table: &table,
            positions: &self.positions,
        };
        let projected = activations(device, &self.projected);
        let mut rotated = device.zeros(Role::Activations, self.projected.len());
        device.rotate(&projected, &rotation, &mut rotated);
        let mut gradient = activations(device, &self.gradient);
        let ones = |length: usize| device.upload(Role::Gradients, &vec![1.0; length]);
        let mut dbias = self.bias.as_ref().map(|_| ones(width));
        let mut dnorms = self.norms.as_ref().map(|_| (ones(dim), ones(dim)));
        let gradients =
            RotationGradients { bias: dbias.as_mut(), query_key_norms: dnorms.as_mut().map(|(query, key)| (query, key)) };
        device.rotate_backward(&projected, &rotation, &mut gradient, gradients);
        let (dquery, dkey) = dnorms.unzip();
        let read = |buffer: Option<D::Buffer>| buffer.map_or_else(Vec::new, |buffer| all(device, &buffer));
        [all(device, &rotated), all(device, &gradient), read(dbias), read(dquery), read(dkey)]
    }
}

fn rotation<D: Testable>(subject: &Subject<D>) {
    for (heads, rows, bias, norms) in [
        (heads(3, 1, 32), 5, true, false),
        (heads(7, 1, 64), 70, false, true),
        (heads(2, 2, 128), 9, true, true),
        (heads(5, 1, 128), 33, false, false),
        (heads(8, 1, 64), 1, true, false),
    ] {
        let inputs = RotationInputs::new(heads, rows, bias, norms);
        let [rotated, dprojected, dbias, dquery, dkey] = subject.run(|device| inputs.run(device));
        let bias = inputs.bias.as_deref().map(wide);
        let norms = inputs.norms.as_ref().map(|[query, key]| (wide(query), wide(key)));
        let (table, projected, gradient) = (wide(&inputs.table), wide(&inputs.projected), wide(&inputs.gradient));
        let rotation = reference::Rotated {
            heads,
            bias: bias.as_deref(),
            query_key_norms: norms.as_ref().map(|(query, key)| (&query[..], &key[..])),
            epsilon: f64::from(EPSILON),
            table: &table,
            positions: &inputs.positions,
        };
        let [(forward, backward), (naive_forward, naive_backward)] = [Precision::Exact, Precision::Bf16].map(|precision| {
            let backward = reference::rotate_backward(precision, &projected, rotation, &gradient);
            (reference::rotate(precision, &projected, rotation), backward)
        });
        let claim = |name: &str, width: usize, found: &[f32], exact: &[f64], naive: &[f64]| {
            let what = format!("{name}, {heads:?}, {rows} rows");
            Claim { what: &what, width, found, exact, naive }.accept_activations::<D>();
        };
        claim("rotated", heads.projected_width(), &rotated, &forward, &naive_forward);
        claim("dprojected", heads.projected_width(), &dprojected, &backward.dprojected, &naive_backward.dprojected);
        for (name, found, exact, naive) in [
            ("dbias", dbias, backward.dbias, naive_backward.dbias),
            ("dquery_norm", dquery, backward.dquery_norm, naive_backward.dquery_norm),
            ("dkey_norm", dkey, backward.dkey_norm, naive_backward.dkey_norm),
        ] {
            let onto_ones = |values: &[f64]| values.iter().map(|value| value + 1.0).collect::<Vec<_>>();
            if !found.is_empty() {
                claim(name, exact.len(), &found, &onto_ones(&exact), &onto_ones(&naive));
            }
        }
    }
}

fn rotated_rows_do_not_depend_on_how_many_there_are<D: Testable>(subject: &Subject<D>) {
    let heads = heads(4, 2, 32);
    let width = heads.projected_width();
    let inputs = RotationInputs::new(heads, 40, true, true);
    let run = |inputs: &RotationInputs| {
        let [rotated, dprojected, ..] = subject.run(|device| inputs.run(device));
        [rotated, dprojected]
    };
    let whole = run(&inputs);
    for (first, rows) in [(0, 1), (39, 1), (3, 33)] {
        for (part, whole) in run(&inputs.part(first, rows)).iter().zip(&whole) {
            assert_same_bits(&format!("{rows} rows from {first}"), part, &whole[first * width..][..rows * width]);
        }
    }
}

fn swiglu<D: Testable>(subject: &Subject<D>) {
    // Gates far on either side of zero, where the sigmoid is 0 or 1.
    for (rows, width, size) in [(1, 8, 1.0), (70, 24, 3.0), (3, 264, 40.0), (2, 1032, 1.0)] {
        let mut numbers = Inputs::new("swiglu");
        let (gate_up, dy) = (numbers.normal(rows * 2 * width, size), numbers.normal(rows * width, 1.0));
        let [y, gradient, again] = subject.run(|device| {
            let (mut gate_up, dy) = (activations(device, &gate_up), activations(device, &dy));
            let zeros = || device.zeros(Role::Activations, rows * width);
            let (mut y, mut again) = (zeros(), zeros());
            device.swiglu(&gate_up, rows, width, &mut y);
            device.swiglu_backward(&dy, &mut gate_up, rows, width, &mut again);
            [all(device, &y), all(device, &gate_up), all(device, &again)]
        });
        assert_same_bits("y given again", &again, &y);
        let (gate_up, dy) = (wide(&gate_up), wide(&dy));
        let claim = |name: &str, width: usize, found: &[f32], expected: &dyn Fn(Precision) -> Vec<f64>| {
            let (exact, naive) = (expected(Precision::Exact), expected(Precision::Bf16));
            Claim { what: name, width, found, exact: &exact, naive: &naive }.accept_activations::<D>();
        };
        claim("y", width, &y, &|precision| reference::swiglu(precision, &gate_up, width));
        claim("dgate_up", 2 * width, &gradient, &|precision| reference::swiglu_backward(precision, &dy, &gate_up, width));
    }
}
