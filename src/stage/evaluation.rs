//! Evaluations on held-out tasks: as a stage of their own, and between the steps of another.

use std::time::Instant;

use serde::Serialize;

use super::{Run, RunError, StageKind, builtin_engine, first_fault, rollout, show, stream};
use crate::device::Device;
use crate::evaluate::{self, Evaluation, HeldOut, Sampling, Stream};

impl<D: Device> Run<'_, D> {
    /// The whole stage: all samples.
    pub(super) fn evaluate_fully(&mut self) -> Result<(), RunError> {
        let (stage, place) = (self.stage()?, self.learner.state.stage);
        let earlier = self.context.stages[..place].iter().filter(|stage| stage.kind == StageKind::Evaluate).count();
        self.evaluate(&stage.name, stream::evaluate(earlier), stage.settings.evaluate.samples)
    }

    /// Evaluates with random numbers of `stream`, unless the run already has the evaluation of this name.
    pub(super) fn evaluate(&mut self, name: &str, stream: u64, samples: usize) -> Result<(), RunError> {
        if self.learner.state.evaluations.contains_key(name) {
            return Ok(());
        }
        let started = Instant::now();
        let context = self.context;
        context.grader.forget();
        let held_out = HeldOut::draw(context.held_out, &context.settings.evaluate, context.seed);
        let total = (held_out.main.len() + held_out.structure.len()) * samples;
        let phase = context.progress.phase(&format!("evaluate {}", name.replace('_', " ")), Some(total as u64));
        let stream = Stream { seed: context.settings.seed, stream, version: self.learner.state.version() };
        let rollout = rollout(context);
        let mut engine = builtin_engine(context, self.learner.trainer.sampler()?);
        let mut on_progress = show(&*phase, "pass");
        // Between steps there may be fewer samples.
        let k: Vec<usize> = context.settings.evaluate.k.iter().copied().filter(|&k| k <= samples).collect();
        let sampling = Sampling { samples, k: &k, stream };
        let (evaluation, episodes) =
            evaluate::evaluate(&rollout, &mut engine, &held_out, sampling, &mut on_progress, context.stop)?;
        drop(on_progress);
        if evaluation.tasks == 0 {
            return Err(RunError::Failed(format!("evaluation {name}: every episode was lost: {}", first_fault(&episodes))));
        }
        phase.finish(&format!("{}: {}", name.replace('_', " "), describe(&evaluation)));
        let counts = self.verdict_counts()?;
        self.learner.state.count_verdicts(counts);
        self.learner.state.count_faults(&episodes);
        self.keep_episodes(name, &episodes)?;
        self.note_evaluation(name, evaluation, started)
    }

    fn note_evaluation(&mut self, name: &str, evaluation: Evaluation, started: Instant) -> Result<(), RunError> {
        #[derive(Serialize)]
        struct Line<'a> {
            kind: &'static str,
            name: &'a str,
            step: u32,
            #[serde(flatten)]
            evaluation: &'a Evaluation,
            seconds: f64,
        }
        let seconds = started.elapsed().as_secs_f64();
        let (stage, step) = (self.stage()?, self.learner.state.version());
        self.write_metrics(&Line { kind: "evaluation", name, step, evaluation: &evaluation, seconds })?;
        let state = &mut self.learner.state;
        state.add_seconds("evaluate", seconds);
        state.of_stage(&stage.name).evaluations.push(name.to_owned());
        state.evaluations.insert(name.to_owned(), evaluation);
        Ok(())
    }
}

/// The line that sums up an evaluation.
fn describe(evaluation: &Evaluation) -> String {
    let Evaluation { pass_at_1, pass_at_8, ci95: [low, high], tasks, samples, .. } = evaluation;
    let pass_at_8 = pass_at_8.map(|value| format!("  pass@8 {value:.3}")).unwrap_or_default();
    format!(
        "pass@1 {pass_at_1:.3} [{low:.3}, {high:.3}]{pass_at_8}  runs tests {:.2}  edits again after a failure {:.2}  \
         ({tasks} tasks x {samples})",
        evaluation.ran_tests, evaluation.edited_after_failure
    )
}
