//! Matrix products: forward, by input, by weight.

use learner::device::Role;

use crate::accept::{Claim, assert_same_bits};
use crate::inputs::Inputs;
use crate::reference::{self, Precision, wide};
use crate::subject::{Matrix, Subject, Testable, activations, all, on_every_device};

on_every_device!(products, rows_do_not_depend_on_how_many_there_are, no_rows);

/// `(rows, outputs, inputs)`: one element of a tile, whole tiles, and both sides of their edges.
const SHAPES: [(usize, usize, usize); 9] = [
    (1, 8, 8),
    (3, 40, 24),
    (16, 64, 64),
    (17, 72, 56),
    (64, 64, 32),
    (65, 136, 72),
    (128, 128, 64),
    (129, 120, 48),
    (140, 264, 136),
];

fn products<D: Testable>(subject: &Subject<D>) {
    for (rows, outputs, inputs) in SHAPES {
        let mut numbers = Inputs::new("products");
        let (x, w) = (numbers.normal(rows * inputs, 1.0), numbers.normal(outputs * inputs, 0.2));
        let (dy, dw) = (numbers.normal(rows * outputs, 1.0), numbers.normal(outputs * inputs, 4.0));
        let [found_y, found_dx, found_dw] = subject.run(|device| {
            let weights = Matrix::new(device, &w, inputs);
            let (x, dy) = (activations(device, &x), activations(device, &dy));
            let mut y = device.zeros(Role::Activations, rows * outputs);
            device.linear(&x, weights.linear(), &mut y, rows);
            let mut dx = device.zeros(Role::Activations, rows * inputs);
            device.linear_input_gradient(&dy, weights.linear(), &mut dx, rows);
            let mut dw = device.upload(Role::Gradients, &dw);
            device.linear_weight_gradient(&dy, &x, &mut dw, rows, outputs, inputs);
            [all(device, &y), all(device, &dx), all(device, &dw)]
        });
        let (x, w, dy, dw) = (wide(&x), wide(&w), wide(&dy), wide(&dw));
        let shape = format!("{rows} rows, {outputs} outputs, {inputs} inputs");
        let claim = |name: &str, width: usize, found: &[f32], expected: &dyn Fn(Precision) -> Vec<f64>| {
            let (exact, naive) = (expected(Precision::Exact), expected(Precision::Bf16));
            Claim { what: &format!("{name}, {shape}"), width, found, exact: &exact, naive: &naive }.accept_activations::<D>();
        };
        claim("y", outputs, &found_y, &|precision| reference::product(precision, &x, &w, inputs));
        claim("dx", inputs, &found_dx, &|precision| reference::linear_input_gradient(precision, &dy, &w, outputs));
        let mut exact = reference::linear_weight_gradient(Precision::Exact, &dy, &x, outputs, inputs);
        exact.iter_mut().zip(&dw).for_each(|(sum, before)| *sum += before);
        let what = format!("dW, {shape}");
        Claim { what: &what, width: inputs, found: &found_dw, exact: &exact, naive: &exact }.accept_floats();
    }
}

fn rows_do_not_depend_on_how_many_there_are<D: Testable>(subject: &Subject<D>) {
    let (most, outputs, inputs) = (150, 136, 72);
    let mut numbers = Inputs::new("rows of products");
    let (x, w) = (numbers.normal(most * inputs, 1.0), numbers.normal(outputs * inputs, 0.2));
    let dy = numbers.normal(most * outputs, 1.0);
    let run = |first: usize, rows: usize| {
        subject.run(|device| {
            let weights = Matrix::new(device, &w, inputs);
            let mut y = device.zeros(Role::Activations, rows * outputs);
            let mut dx = device.zeros(Role::Activations, rows * inputs);
            device.linear(&activations(device, &x[first * inputs..][..rows * inputs]), weights.linear(), &mut y, rows);
            let dy = activations(device, &dy[first * outputs..][..rows * outputs]);
            device.linear_input_gradient(&dy, weights.linear(), &mut dx, rows);
            [all(device, &y), all(device, &dx)]
        })
    };
    let [whole_y, whole_dx] = run(0, most);
    for (first, rows) in [(0, 1), (149, 1), (3, 16), (20, 17), (7, 64), (80, 65), (21, 129)] {
        let [y, dx] = run(first, rows);
        assert_same_bits(&format!("y of {rows} rows from {first}"), &y, &whole_y[first * outputs..][..rows * outputs]);
        assert_same_bits(&format!("dx of {rows} rows from {first}"), &dx, &whole_dx[first * inputs..][..rows * inputs]);
    }
}

fn no_rows<D: Testable>(subject: &Subject<D>) {
    let w = Inputs::new("no rows").normal(16 * 8, 1.0);
    let [y, dw] = subject.run(|device| {
        let weights = Matrix::new(device, &w, 8);
        let empty = device.zeros(Role::Activations, 0);
        let mut y = device.upload(Role::Activations, &[7.0; 16]);
        device.linear(&empty, weights.linear(), &mut y, 0);
        let mut dw = device.upload(Role::Gradients, &w);
        device.linear_weight_gradient(&empty, &empty, &mut dw, 0, 16, 8);
        [all(device, &y), all(device, &dw)]
    });
    assert_same_bits("y", &y, &[7.0; 16]);
    assert_same_bits("dW", &dw, &w);
}
