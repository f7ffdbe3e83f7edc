//! The chunked head: log-probability, entropy, gradients and sampling.

use learner::device::{Cotangents, Device, Role};

use crate::accept::{Claim, assert_same_bits, largest};
use crate::inputs::Inputs;
use crate::reference::{self, Precision, wide};
use crate::subject::{Matrix, Subject, Testable, activations, all, on_every_device};

on_every_device!(
    vocabularies_with_tails,
    peaked_logits,
    logits_far_below_zero,
    confident_targets,
    rows_do_not_depend_on_how_many_there_are,
    sampling,
    no_rows,
);

/// What the head is given.
struct Case {
    what: String,
    inputs: usize,
    temperature: f32,
    hidden: Vec<f32>,
    weights: Vec<f32>,
    targets: Vec<u32>,
}

impl Case {
    fn new(what: &str, rows: usize, vocabulary: usize, inputs: usize, temperature: f32, deviation: f64) -> Case {
        let mut numbers = Inputs::new(what);
        Case {
            what: format!("{what}, {rows} rows, vocabulary {vocabulary}, temperature {temperature}"),
            inputs,
            temperature,
            hidden: numbers.normal(rows * inputs, 1.0),
            weights: numbers.normal(vocabulary * inputs, deviation / (inputs as f64).sqrt()),
            targets: numbers.ids(rows, vocabulary),
        }
    }

    /// `[log_probs, entropies, dhidden, dweights]`, the last summed onto the weights.
    fn run<D: Testable>(&self, subject: &Subject<D>, cotangents: &Cotangents) -> [Vec<f32>; 4] {
        subject.run(|device| {
            let (hidden, weights) = (activations(device, &self.hidden), Matrix::new(device, &self.weights, self.inputs));
            let scores = device.head(&hidden, weights.linear(), &self.targets, self.temperature);
            let mut dhidden = device.zeros(Role::Activations, self.hidden.len());
            let mut dweights = device.upload(Role::Gradients, &self.weights);
            device.head_backward(
                &hidden,
                weights.linear(),
                &self.targets,
                self.temperature,
                cotangents,
                &mut dhidden,
                &mut dweights,
            );
            [scores.log_probs, scores.entropies, all(device, &dhidden), all(device, &dweights)]
        })
    }

    /// Cotangents of any sign and size.
    fn cotangents(&self, entropies: bool) -> Cotangents {
        let mut numbers = Inputs::new("cotangents");
        let mut normal = || numbers.normal(self.targets.len(), 1.0);
        Cotangents { log_probs: normal(), entropies: entropies.then(normal) }
    }

    fn check<D: Testable>(&self, subject: &Subject<D>, entropies: bool) {
        let cotangents = self.cotangents(entropies);
        let [log_probs, found_entropies, dhidden, dweights] = self.run(subject, &cotangents);
        let (hidden, weights) = (wide(&self.hidden), wide(&self.weights));
        let (inputs, targets, temperature) = (self.inputs, &self.targets, f64::from(self.temperature));
        let logits = reference::logits(Precision::Exact, &hidden, &weights, inputs, temperature);
        let exact = reference::head(Precision::Exact, &hidden, &weights, inputs, targets, temperature);
        let rounding = 1e-5 * (1.0 + largest(logits.into_iter())); // of a logit in f32, and of the sum over all
        for (name, found, exact) in
            [("log-probability", &log_probs, &exact.log_probs), ("entropy", &found_entropies, &exact.entropies)]
        {
            let what = format!("{name} of {}", self.what);
            Claim { what: &what, width: 1, found, exact, naive: exact }.accept_within(rounding, "f32 logits");
        }
        let dlog_probs = wide(&cotangents.log_probs);
        let dentropies = cotangents.entropies.as_deref().map_or_else(|| vec![0.0; targets.len()], wide);
        let [exact, naive] = [Precision::Exact, Precision::Bf16].map(|precision| {
            let mut gradients =
                reference::head_backward(precision, &hidden, &weights, inputs, targets, temperature, &dlog_probs, &dentropies);
            gradients.dweights.iter_mut().zip(&weights).for_each(|(sum, before)| *sum += before);
            gradients
        });
        for (name, found, exact, naive) in
            [("dhidden", &dhidden, &exact.dhidden, &naive.dhidden), ("dweights", &dweights, &exact.dweights, &naive.dweights)]
        {
            let what = format!("{name} of {}", self.what);
            let claim = Claim { what: &what, width: inputs, found, exact, naive };
            match D::ACTIVATIONS {
                Precision::Bf16 => claim.accept_activations::<D>(),
                // Every probability carries the rounding of the logits, and what it is multiplied by is large.
                Precision::Exact => {
                    let factor = largest(weights.iter().copied()).max(largest(hidden.iter().copied()));
                    claim.accept_within(rounding * factor, "f32 logits");
                }
            }
        }
    }
}

fn vocabularies_with_tails<D: Testable>(subject: &Subject<D>) {
    Case::new("tail", 5, 430, 64, 1.0, 3.0).check(subject, true);
    Case::new("tail", 1, 1187, 40, 0.7, 3.0).check(subject, false);
    Case::new("tail", 66, 53, 72, 1.3, 3.0).check(subject, true);
    Case::new("tail", 3, 4099, 24, 1.0, 3.0).check(subject, true);
    Case::new("Qwen's vocabulary", 2, 151_936, 8, 1.0, 3.0).check(subject, true);
}

/// Logits of deviation 40: uniform ones would hide a wrong tail.
fn peaked_logits<D: Testable>(subject: &Subject<D>) {
    Case::new("peaked", 9, 430, 64, 1.0, 40.0).check(subject, true);
}

/// All logits near -60: a padded column that counts as 0 would take all the probability.
fn logits_far_below_zero<D: Testable>(subject: &Subject<D>) {
    let mut case = Case::new("below zero", 6, 430, 64, 1.0, 2.0);
    case.hidden.chunks_exact_mut(64).for_each(|row| row[0] = 8.0);
    case.weights.chunks_exact_mut(64).for_each(|row| row[0] = -7.5);
    case.check(subject, true);
}

/// Targets of probability 0.9999: their gradient `1 - p` survives only if it is computed in f32 and not as 1 minus a rounded `p`.
fn confident_targets<D: Testable>(subject: &Subject<D>) {
    let (vocabulary, inputs) = (430, 64);
    let mut case = Case::new("confident", 4, vocabulary, inputs, 1.0, 1.0);
    case.targets = vec![3, 100, 429, 256];
    // Column `row` of the weights is seen by row `row` of the hidden states alone, and only the target's entry in it counts.
    for (row, hidden) in case.hidden.chunks_exact_mut(inputs).enumerate() {
        (0..4).for_each(|column| hidden[column] = if column == row { 1.0 } else { 0.0 });
    }
    for (id, weights) in case.weights.chunks_exact_mut(inputs).enumerate() {
        (0..4).for_each(|column| weights[column] = if case.targets[column] == id as u32 { 16.0 } else { 0.0 });
    }
    case.check(subject, true);
    let cotangents = Cotangents { log_probs: vec![1.0; 4], entropies: None };
    let [log_probs, _, _, dweights] = case.run(subject, &cotangents);
    for (row, &target) in case.targets.iter().enumerate() {
        let place = target as usize * inputs + row;
        let found = f64::from(dweights[place] - case.weights[place]);
        let exact = -f64::from(log_probs[row]).exp_m1();
        assert!(exact < 1e-3, "row {row} was to be confident, but 1 - p is {exact}");
        // dweights were summed onto 16 in f32, which leaves 16 * 2^-24 of rounding; dlogits are rounded to bf16.
        assert!((found - exact).abs() <= exact / 128.0 + 2e-6, "row {row}: gradient {found}, exactly {exact}");
    }
}

fn rows_do_not_depend_on_how_many_there_are<D: Testable>(subject: &Subject<D>) {
    let (inputs, most) = (64, 70);
    let whole = Case::new("rows", most, 430, inputs, 0.9, 3.0);
    let cotangents = whole.cotangents(true);
    let [log_probs, entropies, dhidden, _] = whole.run(subject, &cotangents);
    for (first, rows) in [(0, 1), (69, 1), (4, 17), (2, 65)] {
        let part = |values: &[f32]| values[first..first + rows].to_vec();
        let case = Case {
            what: String::new(),
            hidden: whole.hidden[first * inputs..][..rows * inputs].to_vec(),
            weights: whole.weights.clone(),
            targets: whole.targets[first..first + rows].to_vec(),
            ..whole
        };
        let cotangents =
            Cotangents { log_probs: part(&cotangents.log_probs), entropies: cotangents.entropies.as_deref().map(part) };
        let results = case.run(subject, &cotangents);
        assert_same_bits("log-probabilities", &results[0], &part(&log_probs));
        assert_same_bits("entropies", &results[1], &part(&entropies));
        assert_same_bits("dhidden", &results[2], &dhidden[first * inputs..][..rows * inputs]);
    }
}

/// A drawn id is the one whose interval of the cumulative distribution holds the uniform number, and its log-probability has the
/// bits of the scored one.
fn sampling<D: Testable>(subject: &Subject<D>) {
    for (vocabulary, sampleable, temperature, deviation) in
        [(430, 430, 1.0, 3.0), (430, 300, 0.6, 20.0), (1187, 1187, 1.4, 1.0), (430, 17, 0.0, 3.0)]
    {
        let mut case = Case::new("sampling", 40, vocabulary, 64, temperature, deviation);
        let mut numbers = Inputs::new("uniforms");
        let mut uniforms: Vec<f64> = case.targets.iter().map(|_| numbers.uniform()).collect();
        (uniforms[0], uniforms[1]) = (0.0, 1.0 - f64::EPSILON);
        let [ids, log_probs] = subject.run(|device| {
            let (hidden, weights) = (activations(device, &case.hidden), Matrix::new(device, &case.weights, case.inputs));
            let drawn = device.head_sample(&hidden, weights.linear(), temperature, &uniforms, sampleable);
            let (ids, log_probs): (Vec<f32>, Vec<f32>) = drawn.into_iter().map(|(id, log_prob)| (id as f32, log_prob)).unzip();
            [ids, log_probs]
        });
        case.targets = ids.iter().map(|&id| id as u32).collect();
        let scored = case.run(subject, &case.cotangents(false))[0].clone();
        assert_same_bits(&case.what, &log_probs, &scored);
        let divisor = if temperature == 0.0 { 1.0 } else { f64::from(temperature) };
        let logits = reference::logits(Precision::Exact, &wide(&case.hidden), &wide(&case.weights), case.inputs, divisor);
        for (row, logits) in logits.chunks_exact(vocabulary).enumerate() {
            let id = case.targets[row] as usize;
            assert!(id < sampleable, "{}: row {row} drew {id} of {sampleable}", case.what);
            if temperature == 0.0 {
                let best = logits[..sampleable].iter().copied().fold(f64::NEG_INFINITY, f64::max);
                assert!(best - logits[id] < 1e-5, "{}: row {row} took {id}, not the likeliest", case.what);
            } else {
                let (low, high) = reference::sample_interval(logits, sampleable, id);
                let (uniform, slack) = (uniforms[row], 1e-5);
                let holds = low - slack <= uniform && uniform < high + slack;
                assert!(holds, "{}: row {row} drew {id} = [{low}, {high}) at {uniform}", case.what);
            }
        }
    }
}

fn no_rows<D: Testable>(subject: &Subject<D>) {
    let case = Case::new("none", 0, 53, 8, 1.0, 1.0);
    let [log_probs, entropies, dhidden, dweights] = case.run(subject, &case.cotangents(true));
    assert!(log_probs.is_empty() && entropies.is_empty() && dhidden.is_empty());
    assert_same_bits("dweights", &dweights, &case.weights);
}

/// Logits exist in chunks of rows: scores and the gradient by the hidden states have the same bits however they are cut.
#[test]
fn chunks_of_rows_join() {
    crate::subject::on_gpu(|subject| {
        let case = Case::new("chunks", 21, 430, 64, 0.9, 3.0);
        let cotangents = case.cotangents(true);
        let whole = case.run(subject, &cotangents);
        let cut = subject.run(|device| {
            let device = device.clone().with_head_rows(8);
            let (hidden, weights) = (activations(&device, &case.hidden), Matrix::new(&device, &case.weights, case.inputs));
            let scores = device.head(&hidden, weights.linear(), &case.targets, case.temperature);
            let mut dhidden = device.zeros(Role::Activations, case.hidden.len());
            let mut dweights = device.upload(Role::Gradients, &case.weights);
            let (targets, temperature) = (&case.targets, case.temperature);
            device.head_backward(&hidden, weights.linear(), targets, temperature, &cotangents, &mut dhidden, &mut dweights);
            [scores.log_probs, scores.entropies, all(&device, &dhidden), all(&device, &dweights)]
        });
        for (what, cut, whole) in
            [("log-probabilities", 0, 0), ("entropies", 1, 1), ("dhidden", 2, 2)].map(|(what, a, b)| (what, &cut[a], &whole[b]))
        {
            assert_same_bits(what, cut, whole);
        }
        // Gradients by the weights are summed chunk by chunk: in another order.
        for (cut, whole) in cut[3].iter().zip(&whole[3]) {
            assert!((cut - whole).abs() <= 1e-5 * (1.0 + whole.abs()), "{cut} in chunks, {whole} at once");
        }
    });
}
