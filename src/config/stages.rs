//! `[[stages]]`: each table names a stage, says its kind, and overrides single keys of the run file for it.

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::RunFile;
use super::keys::{Lacking, ROOT, take_incomplete};
use super::layers::{merge, one_line};
use crate::algorithm::{Problems, SettingError, SettingErrors};
use crate::model::RopeSettings;
use crate::stage::{CurriculumSettings, Stage, StageKind};

/// What a stage does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Measures the policy on held-out tasks.
    Evaluate,
    /// Rejection fine-tuning.
    Rft,
    /// Reinforcement learning.
    Rl,
    /// Leaves tasks out of the stages after it, by the attempts of an earlier one.
    Curriculum,
}

/// What the run strings together, in order; the usual stages if there are none: evaluation, fine-tuning, evaluation, reinforcement learning,
/// evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageTable {
    /// Unique in its run; `--set stages.NAME.rl.steps=3` changes a key of it.
    pub name: String,
    /// What the stage does.
    pub kind: Kind,
    /// Of a curriculum: the name of the stage whose attempts count, one of reinforcement learning or of fine-tuning on the policy's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Of a curriculum: tasks of which at least this share of the attempts passed are left out; above 1 none is. Two thirds when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drop_solved_at: Option<f64>,
    /// Of a curriculum: leave out tasks of which no attempt passed. True when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drop_unsolved: Option<bool>,
    /// `model.rope` from this stage on; nothing else of a model can change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<Table>,
    /// Keys of `[agent]` for this stage alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<Table>,
    /// Keys of `[engine]` for this stage alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<Table>,
    /// Keys of `[rft]` for this stage alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rft: Option<Table>,
    /// Keys of `[rl]` for this stage alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rl: Option<Table>,
    /// Keys of `[step]` for this stage alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<Table>,
    /// Keys of `[evaluate]` for this stage alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluate: Option<Table>,
}

impl RunFile {
    /// The stages of the run with their settings; the usual ones if it lists none.
    ///
    /// # Errors
    /// All that is wrong with the list or with what a stage overrides.
    pub fn stages(&self) -> Result<Vec<Stage>, SettingErrors> {
        let mut problems = Problems::default();
        let stages = match &self.stages[..] {
            [] => Stage::default_list(&self.stage_settings()),
            tables => {
                let mut stages = Vec::new();
                for table in tables {
                    let mut own = Problems::default();
                    stages.extend(self.resolve(table, &mut own));
                    problems.within(&format!("stages.{}", table.name), own.finish());
                }
                stages
            }
        };
        for Stage { name, kind, settings } in &stages {
            let prefix = if self.stages.is_empty() { String::new() } else { format!("stages.{name}.") };
            if let Some(most) = settings.rope.as_ref().and_then(RopeSettings::length) {
                let (field, tokens) = (format!("{prefix}agent.max_tokens"), settings.agent.max_tokens);
                let remedy = format!("give at most {most}: model.rope makes the model fit for no more");
                problems.unless(tokens <= most, &field, tokens, &remedy);
            }
            if *kind != StageKind::Rl {
                continue;
            }
            problems.within(&format!("{prefix}rl"), settings.rl.check_with(&settings.agent));
            let same = settings.rl.steps > 0 && settings.engine.temperature == 0.0;
            let field = format!("{prefix}engine.temperature");
            problems.unless(
                !same,
                &field,
                0,
                "reinforcement learning needs attempts that differ: set it above 0, or rl.steps = 0",
            );
        }
        // A list with gaps is in no order.
        let gaps = stages.len() < self.stages.len();
        let ordered = Stage::in_order(stages);
        if let (false, Err(errors)) = (gaps, &ordered) {
            problems.join(Err(errors.clone()));
        }
        problems.finish()?;
        ordered
    }

    /// One stage: its table over the run file, and what is wrong with it. `None` where that cannot even be read.
    fn resolve(&self, table: &StageTable, problems: &mut Problems) -> Option<Stage> {
        let broken = |problems: &mut Problems, found: String| {
            problems.unless(false, "settings", found, "correct what the stage overrides");
            None
        };
        let mut merged = match Table::try_from(RunFile { stages: Vec::new(), ..self.clone() }) {
            Ok(merged) => merged,
            Err(error) => return broken(problems, error.to_string()),
        };
        for (section, layer) in table.overrides() {
            let mut layer = layer.clone();
            if section == "model" {
                layer.retain(|key, _| key == "rope");
            }
            merge(&mut merged, Table::from_iter([(section.to_owned(), layer.into())]), &ROOT);
        }
        let mut merged = Value::Table(merged);
        for Lacking { name, field, .. } in take_incomplete(&mut merged) {
            problems.unless(false, &name, "absent", &format!("set it, {}", field.describe()));
        }
        for key in table.model.iter().flat_map(Table::keys).filter(|key| *key != "rope") {
            problems.unless(false, &format!("model.{key}"), "set", "leave it out: only model.rope can change between stages");
        }
        let curriculum = CurriculumSettings::default();
        let kind = match table.kind {
            Kind::Evaluate => StageKind::Evaluate,
            Kind::Rft => StageKind::Rft,
            Kind::Rl => StageKind::Rl,
            Kind::Curriculum => StageKind::Curriculum(CurriculumSettings {
                from: table.from.clone().unwrap_or(curriculum.from),
                drop_solved_at: table.drop_solved_at.unwrap_or(curriculum.drop_solved_at),
                drop_unsolved: table.drop_unsolved.unwrap_or(curriculum.drop_unsolved),
            }),
        };
        if table.kind != Kind::Curriculum {
            for (key, given) in [
                ("from", table.from.is_some()),
                ("drop_solved_at", table.drop_solved_at.is_some()),
                ("drop_unsolved", table.drop_unsolved.is_some()),
            ] {
                problems.unless(!given, key, "set", "leave it out: only a curriculum has it");
            }
        }
        let resolved: RunFile = match merged.try_into() {
            Ok(resolved) => resolved,
            Err(error) => return broken(problems, one_line(&error)),
        };
        // What is wrong with the run file itself is said once, not for every stage.
        let usual = self.check_sections().err().map(|errors| errors.0).unwrap_or_default();
        if let Err(SettingErrors(errors)) = resolved.check_sections() {
            let own: Vec<SettingError> = errors.into_iter().filter(|error| !usual.contains(error)).collect();
            problems.join(if own.is_empty() { Ok(()) } else { Err(SettingErrors(own)) });
        }
        Some(Stage { name: table.name.clone(), kind, settings: resolved.stage_settings() })
    }
}

impl StageTable {
    /// The sections that it overrides keys of.
    fn overrides(&self) -> impl Iterator<Item = (&'static str, &Table)> {
        let StageTable { model, agent, engine, rft, rl, step, evaluate, .. } = self;
        [("model", model), ("agent", agent), ("engine", engine), ("rft", rft), ("rl", rl), ("step", step), ("evaluate", evaluate)]
            .into_iter()
            .filter_map(|(section, table)| Some((section, table.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Layers;
    use super::*;

    fn stages(text: &str) -> Result<Vec<Stage>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        std::fs::write(&path, text).unwrap();
        let mut layers = Layers::from_recipe("smoke");
        layers.add_file(&path);
        layers.finish().map_err(|error| error.to_string())?.stages().map_err(|errors| errors.to_string())
    }

    #[test]
    fn a_stage_overrides_single_keys_and_the_next_one_does_not_have_them() {
        let found = stages(
            "[rl]\nsteps = 3\n[[stages]]\nname = \"stage1\"\nkind = \"rl\"\nagent.max_turns = 40\nrl.loss.clip.epsilon_high = 0.3\n\
             [[stages]]\nname = \"easier\"\nkind = \"curriculum\"\nfrom = \"stage1\"\ndrop_unsolved = false\n\
             [[stages]]\nname = \"stage2\"\nkind = \"rl\"\nrl.group_size = 10\n\
             model.rope = { rope_type = \"yarn\", factor = 4.0 }\n",
        )
        .unwrap();
        let [first, curriculum, second] = &found[..] else { panic!("{found:?}") };
        assert_eq!((first.settings.agent.max_turns, second.settings.agent.max_turns), (40, 6));
        assert_eq!((first.settings.rl.loss.clip.epsilon_high, first.settings.rl.steps), (0.3, 3));
        assert_eq!((second.settings.rl.group_size, second.settings.rl.steps), (10, 3));
        assert!(first.settings.rope.is_none() && second.settings.rope.is_some());
        assert_ne!(first.settings.seed, second.settings.seed);
        let StageKind::Curriculum(settings) = &curriculum.kind else { panic!("{curriculum:?}") };
        assert_eq!((settings.from.as_str(), settings.drop_unsolved), ("stage1", false));
    }

    #[test]
    fn a_stage_is_set_by_its_name() {
        let mut layers = Layers::from_recipe("nebius");
        layers.set("stages.stage2.rl.steps=7");
        let run_file = layers.finish().unwrap();
        let steps = |name: &str| run_file.stages().unwrap().iter().find(|stage| stage.name == name).unwrap().settings.rl.steps;
        assert_eq!((steps("stage1"), steps("stage2")), (run_file.rl.steps, 7));
        let mut layers = Layers::from_recipe("nebius");
        layers.set("stages.stage3.rl.steps=7");
        assert!(layers.finish().unwrap_err().to_string().contains("stage1"));
    }

    #[test]
    fn the_order_is_looked_at_even_where_a_stage_is_wrong() {
        let found = stages(
            "[[stages]]\nname = \"a\"\nkind = \"rl\"\nrl.group_size = 1\n[[stages]]\nname = \"a\"\nkind = \"evaluate\"\n\
             [[stages]]\nname = \"c\"\nkind = \"curriculum\"\nfrom = \"b\"\n",
        )
        .unwrap_err();
        for mention in ["stages.a.rl.group_size is 1", "stages[1].name is \"a\"", "stages[2].from is \"b\""] {
            assert!(found.contains(mention), "{mention}: {found}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_stage_is_named() {
        for (text, mention) in [
            ("kind = \"rl\"", "name"),
            ("name = \"a\"", "kind"),
            ("name = \"a\"\nkind = \"sft\"", "stages.a.kind in"),
            ("name = \"a b\"\nkind = \"rl\"", "stages[0].name"),
            ("name = \"a\"\nkind = \"rl\"\nrl.stepps = 3", "did you mean stages.a.rl.steps?"),
            ("name = \"a\"\nkind = \"rl\"\nrl.steps = true", "stages.a.rl.steps in"),
            ("name = \"a\"\nkind = \"rl\"\nrl.group_size = 1", "stages.a.rl.group_size is 1"),
            ("name = \"a\"\nkind = \"rl\"\nfrom = \"b\"", "stages.a.from"),
            ("name = \"a\"\nkind = \"rl\"\nengine.temperature = 0", "stages.a.engine.temperature"),
            (
                "name = \"a\"\nkind = \"rl\"\nrl.reward.step_penalty.turn_limit = 6",
                "stages.a.rl.reward.step_penalty.free_turns is absent",
            ),
            ("name = \"a\"\nkind = \"rl\"\nmodel.directory = \"x\"", "stages.a.model.directory"),
            ("name = \"a\"\nkind = \"rl\"\nmodel.rope = { rope_type = \"llama3\" }", "llama3"),
            (
                "name = \"a\"\nkind = \"rl\"\nmodel.rope = { rope_type = \"yarn\", factor = 2, original_max_position_embeddings = 100 }",
                "stages.a.agent.max_tokens is 320: give at most 200",
            ),
            ("name = \"a\"\nkind = \"curriculum\"\nfrom = \"b\"", "no earlier stage"),
            ("name = \"a\"\nkind = \"rl\"\n[[stages]]\nname = \"a\"\nkind = \"rl\"", "stages[1].name"),
            ("name = \"a\"\nkind = \"rft\"\n[[stages]]\nname = \"b\"\nkind = \"curriculum\"\nfrom = \"a\"", "rft.collect"),
        ] {
            let problem = stages(&format!("[[stages]]\n{text}\n")).expect_err(text);
            assert!(problem.contains(mention) && !problem.contains('\n'), "{text}: {problem}");
        }
    }
}
