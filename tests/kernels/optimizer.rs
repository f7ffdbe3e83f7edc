//! AdamW over several steps, and the sum of squares.

use learner::device::{AdamWStep, Role};

use crate::accept::{Claim, assert_same_bits};
use crate::inputs::{Inputs, on_grid};
use crate::reference::{self, wide};
use crate::subject::{Matrix, Subject, Testable, activations, all, on_every_device};

on_every_device!(adamw_over_several_steps, products_read_the_stepped_weights, sums_of_squares);

fn step(number: u64) -> AdamWStep {
    AdamWStep {
        learning_rate: 0.01,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: number,
        gradient_scale: if number == 2 { 0.5 } else { 1.0 },
    }
}

fn adamw_over_several_steps<D: Testable>(subject: &Subject<D>) {
    for length in [1, 3, 4, 255, 1025, 5000] {
        let mut numbers = Inputs::new("adamw");
        let weights = numbers.normal(length, 1.0);
        // Gradients of all sizes, zeros among them.
        let gradients: Vec<Vec<f32>> = [1.0, 1e-4, 0.0, 100.0].map(|size| numbers.normal(length, size)).to_vec();
        let found = subject.run(|device| {
            let mut weights = device.upload(Role::Weights, &weights);
            let zeros = || device.zeros(Role::Optimizer, length);
            let (mut first, mut second) = (zeros(), zeros());
            for (index, gradient) in gradients.iter().enumerate() {
                let gradient = device.upload(Role::Gradients, gradient);
                device.adamw(&mut weights, None, &gradient, &mut first, &mut second, step(index as u64 + 1));
            }
            [all(device, &weights), all(device, &first), all(device, &second)]
        });
        let mut state = [wide(&weights), vec![0.0; length], vec![0.0; length]];
        for (index, gradient) in gradients.iter().enumerate() {
            reference::adamw(&mut state, &wide(gradient), step(index as u64 + 1));
        }
        for ((what, found), exact) in ["weights", "first moment", "second moment"].iter().zip(&found).zip(&state) {
            Claim { what, width: length, found, exact, naive: exact }.accept_floats();
        }
    }
}

/// The packed copy follows the step: a product afterwards is the product with the new weights.
fn products_read_the_stepped_weights<D: Testable>(subject: &Subject<D>) {
    let (rows, outputs, inputs) = (4, 24, 40);
    let mut numbers = Inputs::new("stepped weights");
    let (w, x) = (numbers.normal(outputs * inputs, 1.0), numbers.normal(rows * inputs, 1.0));
    let gradient = numbers.normal(outputs * inputs, 1.0);
    let [stepped, fresh] = subject.run(|device| {
        let mut matrix = Matrix::new(device, &w, inputs);
        let mut moments = [device.zeros(Role::Optimizer, w.len()), device.zeros(Role::Optimizer, w.len())];
        let gradient = device.upload(Role::Gradients, &gradient);
        let [first, second] = &mut moments;
        device.adamw(&mut matrix.values, Some(&mut matrix.packed), &gradient, first, second, step(1));
        let x = activations(device, &x);
        let product = |matrix: &Matrix<D>| {
            let mut y = device.zeros(Role::Activations, rows * outputs);
            device.linear(&x, matrix.linear(), &mut y, rows);
            all(device, &y)
        };
        [product(&matrix), product(&Matrix::new(device, &all(device, &matrix.values), inputs))]
    });
    assert_same_bits("products", &stepped, &fresh);
}

fn sums_of_squares<D: Testable>(subject: &Subject<D>) {
    for length in [1, 5, 256, 1023, 70_001] {
        let values: Vec<f32> = Inputs::new("squares").normal(length, 1.0).iter().map(|x| on_grid(f64::from(*x) * 1e3)).collect();
        let found = subject.run(|device| {
            let sum = device.sum_of_squares(&device.upload(Role::Gradients, &values));
            let exact: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
            assert!((sum - exact).abs() <= 1e-12 * exact, "{length} values: {sum}, exactly {exact}");
            [vec![f32::from_bits(sum.to_bits() as u32), f32::from_bits((sum.to_bits() >> 32) as u32)]]
        });
        assert_eq!(found[0].len(), 2);
    }
}
