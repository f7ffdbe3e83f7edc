//! What verl and TRL compute with their own code, from `tests/fixtures/algorithm/make.py`, which lists what is shared.

use std::path::Path;

use learner::algorithm::{
    AdvantageSettings, Aggregation, Beyond, ClipSettings, Denominators, Estimator, KlEstimator, KlSettings, Level, LossSettings,
    Mismatch, Objective, Over, PolicyLoss, Real, RejectionSettings, SampledTokens, Singleton, Statistic, WeightSettings,
    accepted, advantages, importance_weights, normalise, overlong_penalty,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::support::{ADVANTAGES, ENTROPIES, LOG_PROBS, OLD_LOG_PROBS, REFERENCE, Tokens, WEIGHTS, assert_close};

const TOLERANCE: f64 = 1e-6;

#[derive(Deserialize)]
struct Inputs {
    lengths: Vec<usize>,
    trained: Vec<bool>,
    tokens: f64,
    sequences: f64,
    log_probs: Vec<f64>,
    old_log_probs: Vec<f64>,
    sampled_log_probs: Vec<f64>,
    reference_log_probs: Vec<f64>,
    entropies: Vec<f64>,
    advantages: Vec<f64>,
    weights: Vec<f64>,
}

impl Inputs {
    /// As the loss takes them, with importance weights or with none.
    fn tokens(&self, weighted: bool) -> Tokens {
        let mut starts = vec![0];
        starts.extend(self.lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        }));
        let mut tokens = Tokens { starts, trained: self.trained.clone(), ..Tokens::default() };
        tokens.lists[LOG_PROBS] = self.log_probs.clone();
        tokens.lists[OLD_LOG_PROBS] = self.old_log_probs.clone();
        tokens.lists[REFERENCE] = self.reference_log_probs.clone();
        tokens.lists[ENTROPIES] = self.entropies.clone();
        tokens.lists[ADVANTAGES] = self.advantages.clone();
        tokens.lists[WEIGHTS] = if weighted { self.weights.clone() } else { vec![1.0; self.weights.len()] };
        tokens
    }

    fn whole_update(&self) -> Denominators {
        Denominators { tokens: self.tokens, sequences: self.sequences }
    }

    fn trained_tokens(&self) -> f64 {
        self.trained.iter().filter(|&&trained| trained).count() as f64
    }
}

fn fixture(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/algorithm").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("a fixture is JSON")
}

fn of<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value}"))
}

#[track_caller]
fn assert_all_close<R: Real>(found: &[R], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_close((*found).into(), *expected, TOLERANCE, &(what, index));
    }
}

/// Loss and gradients of a case agree, in f64 and in f32. Returns ours.
fn check_loss(tokens: &Tokens, settings: &LossSettings, denominators: &Denominators, case: &Value) -> PolicyLoss<f64> {
    fn check<R: Real>(result: &PolicyLoss<R>, case: &Value, what: &str) {
        assert_close(result.loss, of(&case["loss"]), TOLERANCE, &what);
        assert_all_close(&result.cotangents, &of::<Vec<f64>>(&case["gradient"]), what);
        if let Some(cotangents) = &result.entropy_cotangents {
            assert_all_close(cotangents, &of::<Vec<f64>>(&case["entropy_gradient"]), what);
        }
    }
    assert_eq!(settings.check(), Ok(()));
    let result = tokens.loss::<f64>(settings, denominators);
    check(&result, case, &format!("{settings:?}"));
    check(&tokens.loss::<f32>(settings, denominators), case, &format!("in f32: {settings:?}"));
    result
}

#[test]
fn losses_of_verl() {
    let fixture = fixture("verl.json");
    let inputs: Inputs = of(&fixture["inputs"]);
    let cases: Vec<Value> = of(&fixture["losses"]);
    assert_eq!(cases.len(), 23);
    for case in cases {
        let name: String = of(&case["objective"]);
        let kl: Option<String> = of(case.get("kl").unwrap_or(&Value::Null));
        let number = |key: &str| case.get(key).and_then(Value::as_f64);
        let settings = LossSettings {
            objective: match name.as_str() {
                "clip" => Objective::Clip,
                "gspo" => Objective::Gspo,
                _ => Objective::Cispo,
            },
            clip: ClipSettings { epsilon_low: of(&case["low"]), epsilon_high: of(&case["high"]), dual_clip: number("dual_clip") },
            aggregation: match of::<String>(&case["mode"]).as_str() {
                "token-mean" => Aggregation::TokenMean,
                "seq-mean-token-mean" => Aggregation::SeqMeanTokenMean,
                "seq-mean-token-sum" => Aggregation::SeqMeanTokenSum,
                "seq-mean-token-sum-norm" => Aggregation::SeqMeanTokenSumNorm,
                _ => Aggregation::Constant, // token-sum
            },
            constant: number("constant"),
            kl: KlSettings {
                // k1 without k2's gradient is refused as a loss; its own gradient is compared in the unit tests.
                coefficient: if kl.as_deref() == Some("k1") { 0.0 } else { number("kl_coefficient").unwrap_or(0.0) },
                estimator: match kl.as_deref() {
                    Some("k2") => KlEstimator::K2,
                    _ => KlEstimator::K3,
                },
                k2_gradient: kl.as_deref() == Some("k3+"),
            },
            entropy_coefficient: number("entropy_coefficient").unwrap_or(0.0),
            ..LossSettings::default()
        };
        if kl.as_deref() == Some("k1") {
            check_k1(&inputs, settings, &case);
            continue;
        }
        let result = check_loss(&inputs.tokens(of(&case["weighted"])), &settings, &inputs.whole_update(), &case);
        let metrics = &case["metrics"];
        let statistics = &result.statistics;
        assert_close(statistics.clip_fraction(), of(&metrics["actor/pg_clipfrac"]), TOLERANCE, &settings);
        assert_close(statistics.dual_clip_fraction(), of(&metrics["actor/pg_clipfrac_lower"]), TOLERANCE, &settings);
        // One log-ratio is 25; all but GSPO hold it at 20 here too.
        let held = if settings.objective == Objective::Gspo { 0.0 } else { 5.0 / inputs.trained_tokens() };
        assert_close(statistics.approximate_kl() + held, of(&metrics["actor/ppo_kl"]), TOLERANCE, &settings);
    }
}

/// As settings, k1 is refused without k2's gradient; the formula itself still agrees.
fn check_k1(inputs: &Inputs, mut settings: LossSettings, case: &Value) {
    settings.kl = KlSettings { coefficient: of(&case["kl_coefficient"]), estimator: KlEstimator::K1, k2_gradient: false };
    let result = inputs.tokens(false).loss::<f64>(&settings, &inputs.whole_update());
    assert_close(result.loss, of(&case["loss"]), TOLERANCE, &"k1");
    assert_all_close(&result.cotangents, &of::<Vec<f64>>(&case["gradient"]), "k1");
}

#[test]
fn bypass_of_verl() {
    let fixture = fixture("verl.json");
    let inputs: Inputs = of(&fixture["inputs"]);
    let cases: Vec<Value> = of(&fixture["bypass"]);
    assert_eq!(cases.len(), 5);
    for case in cases {
        let mut tokens = inputs.tokens(false);
        tokens.lists[OLD_LOG_PROBS] = inputs.sampled_log_probs.clone();
        let sampled = SampledTokens {
            starts: &tokens.starts,
            trained: &tokens.trained,
            log_probs: &inputs.log_probs,
            sampled_log_probs: &inputs.sampled_log_probs,
        };
        let reinforce = of::<String>(&case["loss_type"]) == "reinforce";
        let mut settings = LossSettings::default();
        let mut trained = tokens.trained.clone();
        let mut weights = tokens.lists[WEIGHTS].clone();
        if reinforce {
            settings.objective = Objective::Reinforce;
            if let Some(level) = case.get("rollout_is") {
                let threshold = &case["rollout_is_threshold"];
                let text = threshold.as_str().map_or_else(|| threshold.to_string(), str::to_string);
                weights = importance_weights(&sampled, &weight_settings(&of::<String>(level), &text)).0;
            }
            if let Some(options) = case.get("rollout_rs") {
                let thresholds = case["rollout_rs_threshold"].to_string();
                trained = accepted(&sampled, &rejections(&of::<String>(options), &thresholds));
            }
        } else {
            settings.clip.dual_clip = Some(3.0);
        }
        tokens.lists[WEIGHTS] = weights;
        tokens.trained = trained;
        check_loss(&tokens, &settings, &inputs.whole_update(), &case);
    }
}

fn weight_settings(level: &str, threshold: &str) -> WeightSettings {
    let level = if level == "token" { Level::Token } else { Level::Sequence };
    let number = |text: &str| text.parse::<f64>().expect("a bound");
    match threshold.split_once('_') {
        Some((lower, upper)) => WeightSettings {
            level,
            beyond: Beyond::Mask,
            lower: Some(number(lower)),
            upper: number(upper),
            ..WeightSettings::default()
        },
        None => WeightSettings { level, upper: number(threshold), ..WeightSettings::default() },
    }
}

fn rejections(options: &str, thresholds: &str) -> Vec<RejectionSettings> {
    let rejection = |(option, threshold): (&str, &str)| {
        let (over, statistic) = option.rsplit_once('_').expect("an option");
        RejectionSettings {
            statistic: match statistic {
                "k1" => Statistic::K1,
                "k2" => Statistic::K2,
                _ => Statistic::K3,
            },
            over: match over {
                "token" => Over::Token,
                "seq_sum" => Over::SequenceSum,
                "seq_mean" => Over::SequenceMean,
                _ => Over::SequenceMax,
            },
            lower: None,
            upper: threshold.parse().expect("a bound"),
        }
    };
    options.split(',').zip(thresholds.split(',')).map(rejection).collect()
}

#[test]
fn importance_weights_of_verl() {
    let fixture = fixture("verl.json");
    let inputs: Inputs = of(&fixture["inputs"]);
    let tokens = inputs.tokens(false);
    let sampled = SampledTokens {
        starts: &tokens.starts,
        trained: &tokens.trained,
        log_probs: &inputs.old_log_probs,
        sampled_log_probs: &inputs.sampled_log_probs,
    };
    let cases: Vec<Value> = of(&fixture["weights"]);
    assert_eq!(cases.len(), 12);
    for case in cases {
        let (level, threshold): (String, String) = (of(&case["level"]), of(&case["threshold"]));
        let what = format!("{level} {threshold}");
        let settings = weight_settings(&level, &threshold);
        assert_eq!(settings.check(), Ok(()));
        let (mut weights, statistics) = importance_weights(&sampled, &settings);
        let metrics = &case["metrics"];
        if of(&case["normalise"]) {
            normalise(&mut weights, statistics.mean());
            assert_close(statistics.mean(), of(&metrics["rollout_is_batch_norm_factor"]), TOLERANCE, &what);
        }
        assert_all_close(&weights, &of::<Vec<f64>>(&case["weights"]), &what);
        if level == "token" {
            assert_close(statistics.mean(), of(&metrics["rollout_is_mean"]), TOLERANCE, &what);
            assert_close(statistics.effective_sample_size(), of(&metrics["rollout_is_eff_sample_size"]), TOLERANCE, &what);
            assert_close(statistics.fraction_above(), of(&metrics["rollout_is_ratio_fraction_high"]), TOLERANCE, &what);
            assert_close(statistics.fraction_below(), of(&metrics["rollout_is_ratio_fraction_low"]), TOLERANCE, &what);
        }
    }
    let cases: Vec<Value> = of(&fixture["rejections"]);
    assert_eq!(cases.len(), 10);
    for case in cases {
        let (options, thresholds): (String, String) = (of(&case["options"]), of(&case["thresholds"]));
        let found: Vec<f64> =
            accepted(&sampled, &rejections(&options, &thresholds)).into_iter().map(|kept| f64::from(u8::from(kept))).collect();
        assert_eq!(found, of::<Vec<f64>>(&case["mask"]), "{options}");
    }
}

#[test]
fn mismatch_of_verl() {
    let fixture = fixture("verl.json");
    let inputs: Inputs = of(&fixture["inputs"]);
    let tokens = inputs.tokens(false);
    let cases: Vec<Value> = of(&fixture["mismatch"]);
    assert_eq!(cases.len(), 5);
    for case in cases {
        let row: usize = of(&case["row"]);
        let of_row = |list: &[f64]| -> Vec<f32> {
            let range = tokens.starts[row]..tokens.starts[row + 1];
            range.filter(|&token| tokens.trained[token]).map(|token| list[token] as f32).collect()
        };
        let mismatch = Mismatch::measure(&of_row(&inputs.sampled_log_probs), &of_row(&inputs.old_log_probs));
        assert_close(-mismatch.mean(), of(&case["kl"]), TOLERANCE, &row);
        assert_close(mismatch.sampled_perplexity(), of(&case["rollout_ppl"]), TOLERANCE, &row);
        assert_close(mismatch.recomputed_perplexity(), of(&case["training_ppl"]), TOLERANCE, &row);
        if mismatch.max_absolute < 20.0 {
            assert_close(mismatch.k3(), of(&case["k3_kl"]), TOLERANCE, &row);
        }
    }
}

/// Advantages of all groups, one after the other.
fn advantages_of(groups: &[Vec<f64>], settings: &AdvantageSettings) -> Vec<f64> {
    groups.iter().flat_map(|rewards| advantages(rewards, settings)).collect()
}

#[test]
fn advantages_of_verl() {
    let fixture = &fixture("verl.json")["advantages"];
    let groups: Vec<Vec<f64>> = of(&fixture["rewards"]);
    for (name, estimator, singleton) in [
        ("grpo", Estimator::Grpo, Singleton::Reward),
        ("grpo_vectorized", Estimator::Grpo, Singleton::Reward),
        ("dr_grpo", Estimator::DrGrpo, Singleton::Reward),
        ("rloo", Estimator::LeaveOneOut, Singleton::Reward),
        ("rloo_vectorized", Estimator::LeaveOneOut, Singleton::Zero),
    ] {
        let settings = AdvantageSettings { estimator, singleton, ..AdvantageSettings::default() };
        assert_all_close(&advantages_of(&groups, &settings), &of::<Vec<f64>>(&fixture[name]), name);
        if name != "grpo_vectorized" {
            assert_close(advantages(&[0.5], &settings)[0], of(&fixture["singletons"][name]), TOLERANCE, &name);
        }
    }
}

#[test]
fn advantages_of_trl() {
    let cases: Vec<Value> = of(&fixture("trl.json")["advantages"]);
    assert_eq!(cases.len(), 2);
    for case in cases {
        let groups: Vec<Vec<f64>> = of(&case["rewards"]);
        for (name, estimator) in [("grpo", Estimator::Grpo), ("dr_grpo", Estimator::DrGrpo), ("rloo", Estimator::LeaveOneOut)] {
            let settings = AdvantageSettings { estimator, epsilon: 1e-4, ..AdvantageSettings::default() };
            assert_all_close(&advantages_of(&groups, &settings), &of::<Vec<f64>>(&case[name]), name);
        }
    }
}

#[test]
fn losses_of_trl() {
    let fixture = fixture("trl.json");
    let inputs: Inputs = of(&fixture["inputs"]);
    let rows = inputs.lengths.len() as f64;
    let cases: Vec<Value> = of(&fixture["losses"]);
    assert_eq!(cases.len(), 9);
    for case in cases {
        let loss_type: String = of(&case["loss_type"]);
        let of_sequences = of::<String>(&case["level"]) == "sequence";
        let (aggregation, tokens, constant) = match loss_type.as_str() {
            "grpo" => (Aggregation::SeqMeanTokenMean, inputs.tokens, None),
            "bnpo" => (Aggregation::TokenMean, inputs.trained_tokens(), None),
            "dr_grpo" => (Aggregation::SeqMeanTokenSumNorm, inputs.tokens, Some(50.0)),
            _ => (Aggregation::TokenMean, inputs.tokens, None),
        };
        let cispo = loss_type == "cispo";
        let (low, high): (f64, f64) = (of(&case["low"]), of(&case["high"]));
        let settings = LossSettings {
            objective: match (cispo, of_sequences) {
                (true, _) => Objective::Cispo,
                (_, true) => Objective::Gspo,
                _ => Objective::Clip,
            },
            // TRL's bound of CISPO is the ratio itself, and there is none below.
            clip: ClipSettings {
                epsilon_low: if cispo { 1.0 } else { low },
                epsilon_high: if cispo { high - 1.0 } else { high },
                dual_clip: case["delta"].as_f64(),
            },
            aggregation,
            constant,
            kl: KlSettings { coefficient: of(&case["beta"]), ..KlSettings::default() },
            entropy_coefficient: of(&case["entropy_coefficient"]),
            ..LossSettings::default()
        };
        // Its mean over sequences divides by all rows, the masked one included.
        let denominators = Denominators { tokens, sequences: rows };
        let result = check_loss(&inputs.tokens(of(&case["weighted"])), &settings, &denominators, &case);
        let metric = |name: &str| case["metrics"].get(name).and_then(Value::as_f64);
        if let (Some(low), Some(high), false) = (metric("clip_ratio/low_mean"), metric("clip_ratio/high_mean"), of_sequences) {
            assert_close(result.statistics.clip_fraction_low(), low, TOLERANCE, &loss_type);
            assert_close(result.statistics.clip_fraction_high(), high, TOLERANCE, &loss_type);
        }
        if let Some(kl) = metric("kl") {
            assert_close(result.statistics.reference_kl(), kl, TOLERANCE, &loss_type);
        }
    }
}

#[test]
fn importance_weights_of_trl() {
    let fixture = fixture("trl.json");
    let inputs: Inputs = of(&fixture["inputs"]);
    let tokens = inputs.tokens(false);
    let sampled = SampledTokens {
        starts: &tokens.starts,
        trained: &tokens.trained,
        log_probs: &inputs.old_log_probs,
        sampled_log_probs: &inputs.sampled_log_probs,
    };
    let cases: Vec<Value> = of(&fixture["weights"]);
    assert_eq!(cases.len(), 8);
    for case in cases {
        let mode: String = of(&case["mode"]);
        let settings = WeightSettings {
            level: if mode.starts_with("token") { Level::Token } else { Level::Sequence },
            beyond: if mode.ends_with("truncate") { Beyond::Truncate } else { Beyond::Mask },
            lower: of(&case["low"]),
            upper: of(&case["high"]),
            normalise: false,
        };
        let (weights, _) = importance_weights(&sampled, &settings);
        let expected: Vec<f64> = of(&case["weights"]);
        for token in (0..weights.len()).filter(|&token| tokens.trained[token]) {
            assert_close(weights[token], expected[token], TOLERANCE, &(&mode, token));
        }
    }
}

#[test]
fn overlong_penalties() {
    for name in ["verl.json", "trl.json"] {
        let fixture = &fixture(name)["overlong"];
        let (lengths, limit, buffer): (Vec<u64>, u64, u64) =
            (of(&fixture["lengths"]), of(&fixture["limit"]), of(&fixture["buffer"]));
        assert!(!lengths.is_empty());
        let found: Vec<f64> = lengths.into_iter().map(|length| overlong_penalty(length, limit, buffer)).collect();
        assert_all_close(&found, &of::<Vec<f64>>(&fixture["penalties"]), name);
    }
}
