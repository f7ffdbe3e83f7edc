//! The language-model head: scores of the next token and their gradients.

use super::{Precision, linear_input_gradient, linear_weight_gradient, product};

pub struct Scored {
    pub log_probs: Vec<f64>,
    pub entropies: Vec<f64>,
}

pub struct HeadGradients {
    pub dhidden: Vec<f64>,
    pub dweights: Vec<f64>,
}

/// `[rows, vocabulary]` divided by the temperature.
pub fn logits(precision: Precision, hidden: &[f64], weights: &[f64], inputs: usize, temperature: f64) -> Vec<f64> {
    precision.stored_all(product(precision, hidden, weights, inputs).into_iter().map(|logit| logit / temperature))
}

/// Log-probabilities of a row of logits.
fn log_softmax(precision: Precision, logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let log_sum = logits.iter().map(|logit| (logit - largest).exp()).sum::<f64>().ln();
    precision.stored_all(logits.iter().map(|logit| (logit - largest) - log_sum))
}

fn entropy(precision: Precision, log_probs: &[f64]) -> f64 {
    -log_probs.iter().map(|log_prob| precision.stored(log_prob.exp()) * log_prob).sum::<f64>()
}

pub fn head(precision: Precision, hidden: &[f64], weights: &[f64], inputs: usize, targets: &[u32], temperature: f64) -> Scored {
    let vocabulary = weights.len() / inputs;
    let mut scored = Scored { log_probs: Vec::new(), entropies: Vec::new() };
    for (row, &target) in logits(precision, hidden, weights, inputs, temperature).chunks_exact(vocabulary).zip(targets) {
        let log_probs = log_softmax(precision, row);
        scored.log_probs.push(log_probs[target as usize]);
        scored.entropies.push(precision.stored(entropy(precision, &log_probs)));
    }
    scored
}

/// With `z = logit / temperature`, `p = softmax(z)` and `H` its entropy: `dz = a (1[target] - p) - b p (log p + H)` for
/// cotangents `a` of the log-probability and `b` of the entropy.
#[allow(clippy::too_many_arguments)]
pub fn head_backward(
    precision: Precision,
    hidden: &[f64],
    weights: &[f64],
    inputs: usize,
    targets: &[u32],
    temperature: f64,
    dlog_probs: &[f64],
    dentropies: &[f64],
) -> HeadGradients {
    let vocabulary = weights.len() / inputs;
    let mut dlogits = Vec::new();
    let all = logits(precision, hidden, weights, inputs, temperature);
    for (row, logits) in all.chunks_exact(vocabulary).enumerate() {
        let log_probs = log_softmax(precision, logits);
        let entropy = entropy(precision, &log_probs);
        let (a, b) = (dlog_probs[row], dentropies[row]);
        dlogits.extend(log_probs.iter().enumerate().map(|(id, log_prob)| {
            let p = precision.stored(log_prob.exp());
            let target = if id == targets[row] as usize { 1.0 } else { 0.0 };
            precision.stored((a * (target - p) - b * p * (log_prob + entropy)) / temperature)
        }));
    }
    HeadGradients {
        dhidden: linear_input_gradient(precision, &dlogits, weights, vocabulary),
        dweights: linear_weight_gradient(precision, &dlogits, hidden, vocabulary, inputs),
    }
}

/// The interval of uniform numbers that draw `id` from ids `0 .. sampleable` of a row of logits.
pub fn sample_interval(logits: &[f64], sampleable: usize, id: usize) -> (f64, f64) {
    let log_probs = log_softmax(Precision::Exact, &logits[..sampleable]);
    let below: f64 = log_probs[..id].iter().map(|log_prob| log_prob.exp()).sum();
    (below, below + log_probs[id].exp())
}
