//! Each hand-written backward against finite differences of its forward, in f64.

use learner::device::{Heads, Span};

use super::{Precision, Rotated, dot};
use crate::inputs::Inputs;

/// Along random directions `d` and for random cotangents `c`: `(c . f(x + h d) - c . f(x - h d)) / 2h` is `backward(c) . d`.
fn check(what: &str, x: &[f64], forward: impl Fn(&[f64]) -> Vec<f64>, backward: impl Fn(&[f64]) -> Vec<f64>) {
    let mut inputs = Inputs::new(what);
    let outputs = forward(x).len();
    for _ in 0..3 {
        let direction = inputs.wide(x.len(), 1.0);
        let cotangent = inputs.wide(outputs, 1.0);
        let step = 1e-5;
        let moved = |sign: f64| {
            let x: Vec<f64> = x.iter().zip(&direction).map(|(x, d)| x + sign * step * d).collect();
            dot(&forward(&x), &cotangent)
        };
        let numeric = (moved(1.0) - moved(-1.0)) / (2.0 * step);
        let gradient = backward(&cotangent);
        assert_eq!(gradient.len(), x.len(), "{what}");
        let analytic = dot(&gradient, &direction);
        assert!((numeric - analytic).abs() < 1e-6 * (1.0 + analytic.abs()), "{what}: numeric {numeric}, analytic {analytic}");
    }
}

const EXACT: Precision = Precision::Exact;

#[test]
fn linear() {
    let mut inputs = Inputs::new("linear differences");
    let (x, w) = (inputs.wide(5 * 3, 1.0), inputs.wide(4 * 3, 1.0));
    let forward = |x: &[f64], w: &[f64]| super::product(EXACT, x, w, 3);
    check("dx of linear", &x, |x| forward(x, &w), |dy| super::linear_input_gradient(EXACT, dy, &w, 4));
    check("dW of linear", &w, |w| forward(&x, w), |dy| super::linear_weight_gradient(EXACT, dy, &x, 4, 3));
}

#[test]
fn embedding() {
    let ids = [2, 0, 2, 1, 2];
    let table = Inputs::new("embedding differences").wide(4 * 3, 1.0);
    let look_up = |table: &[f64]| ids.iter().flat_map(|&id| table[id as usize * 3..][..3].to_vec()).collect();
    check("embedding", &table, look_up, |dx| super::embed_backward(EXACT, dx, &ids, 3, 4));
}

#[test]
fn rms_norm() {
    let mut inputs = Inputs::new("norm differences");
    let (x, weight) = (inputs.wide(3 * 6, 1.0), inputs.wide(6, 1.0));
    let backward = |dy: &[f64]| super::rms_norm_backward(EXACT, dy, &x, &weight, 1e-3);
    check("dx of the norm", &x, |x| super::rms_norm(EXACT, x, &weight, 1e-3), |dy| backward(dy).dx);
    check("dweight of the norm", &weight, |w| super::rms_norm(EXACT, &x, w, 1e-3), |dy| backward(dy).dweight);
}

#[test]
fn rotation() {
    let mut inputs = Inputs::new("rotation differences");
    let heads = Heads { query_heads: 4, key_value_heads: 2, head_dim: 6 };
    let width = heads.projected_width();
    let table = super::wide(&super::rotary_table(9, 6, 100.0));
    let positions = [0, 1, 8];
    let projected = inputs.wide(positions.len() * width, 1.0);
    let (bias, query, key) = (inputs.wide(width, 1.0), inputs.wide(6, 1.0), inputs.wide(6, 1.0));
    let whole = Rotated {
        heads,
        bias: Some(&bias),
        query_key_norms: Some((&query, &key)),
        epsilon: 1e-3,
        table: &table,
        positions: &positions,
    };
    for rotation in [whole, Rotated { query_key_norms: None, ..whole }, Rotated { bias: None, ..whole }] {
        let backward = |dy: &[f64]| super::rotate_backward(EXACT, &projected, rotation, dy);
        check("rotation", &projected, |x| super::rotate(EXACT, x, rotation), |dy| backward(dy).dprojected);
    }
    let forward = |rotation: Rotated| super::rotate(EXACT, &projected, rotation);
    let backward = |dy: &[f64]| super::rotate_backward(EXACT, &projected, whole, dy);
    check("bias", &bias, |bias| forward(Rotated { bias: Some(bias), ..whole }), |dy| backward(dy).dbias);
    let norms = |query: &[f64], key: &[f64]| forward(Rotated { query_key_norms: Some((query, key)), ..whole });
    check("query norm", &query, |query| norms(query, &key), |dy| backward(dy).dquery_norm);
    check("key norm", &key, |key| norms(&query, key), |dy| backward(dy).dkey_norm);
}

#[test]
fn attention() {
    let heads = Heads { query_heads: 4, key_value_heads: 2, head_dim: 3 };
    let spans = [Span { start: 0, length: 5 }, Span { start: 5, length: 1 }, Span { start: 6, length: 4 }];
    let rotated = Inputs::new("attention differences").wide(10 * heads.projected_width(), 1.0);
    check(
        "attention",
        &rotated,
        |x| super::attention(EXACT, x, heads, &spans).output,
        |dy| super::attention_backward(EXACT, dy, &rotated, heads, &spans),
    );
}

#[test]
fn swiglu() {
    let gate_up = Inputs::new("swiglu differences").wide(3 * 2 * 5, 2.0);
    check("swiglu", &gate_up, |x| super::swiglu(EXACT, x, 5), |dy| super::swiglu_backward(EXACT, dy, &gate_up, 5));
}

#[test]
fn head() {
    let mut inputs = Inputs::new("head differences");
    let (hidden, weights) = (inputs.wide(3 * 4, 1.0), inputs.wide(7 * 4, 1.0));
    let targets = [6, 0, 3];
    let forward = |hidden: &[f64], weights: &[f64]| {
        let scored = super::head(EXACT, hidden, weights, 4, &targets, 0.7);
        [scored.log_probs, scored.entropies].concat()
    };
    let backward = |c: &[f64]| super::head_backward(EXACT, &hidden, &weights, 4, &targets, 0.7, &c[..3], &c[3..]);
    check("dhidden of the head", &hidden, |hidden| forward(hidden, &weights), |c| backward(c).dhidden);
    check("dweights of the head", &weights, |weights| forward(&hidden, weights), |c| backward(c).dweights);
}
