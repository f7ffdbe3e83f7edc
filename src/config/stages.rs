//! `[[stages]]`: each table names a stage, says its kind, and overrides single keys of the run file for it.

use serde::Deserialize;
use toml::{Table, Value};

use super::RunFile;
use super::layers::{merge, one_line};
use crate::stage::{CurriculumSettings, Stage, StageKind};

/// Sections that a stage may override.
const OVERRIDDEN: [&str; 6] = ["agent", "engine", "rft", "rl", "step", "evaluate"];

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Evaluate,
    Rft,
    Rl,
    Curriculum,
}

impl RunFile {
    /// The stages of the run with their settings; the usual ones if it lists none.
    ///
    /// # Errors
    /// One line naming the stage and the key that makes no sense.
    pub fn stages(&self) -> Result<Vec<Stage>, String> {
        let stages = match &self.stages[..] {
            [] => Stage::default_list(&self.stage_settings()),
            tables => {
                let resolve = |(index, table)| self.resolve(table).map_err(|problem| format!("stages[{index}]: {problem}"));
                tables.iter().enumerate().map(resolve).collect::<Result<_, _>>()?
            }
        };
        for Stage { name, kind, settings } in &stages {
            if *kind == StageKind::Rl && settings.rl.steps > 0 && settings.engine.temperature == 0.0 {
                return Err(format!(
                    "engine.temperature = 0 in stage {name:?}: reinforcement learning needs attempts that differ; set it above 0 or \
                     rl.steps = 0"
                ));
            }
        }
        Stage::in_order(stages)
    }

    /// One stage: its table over the run file.
    fn resolve(&self, table: &Table) -> Result<Stage, String> {
        let mut table = table.clone();
        let mut take = |key: &str| table.remove(key);
        let name = take("name").and_then(|name| Some(name.as_str()?.to_owned())).ok_or("name is missing")?;
        let kind: Kind =
            take("kind").ok_or("kind is missing")?.try_into().map_err(|error| format!("kind: {}", one_line(&error)))?;
        let mut merged = Table::try_from(RunFile { stages: Vec::new(), ..self.clone() }).map_err(|error| error.to_string())?;
        for section in OVERRIDDEN {
            if let Some(layer) = take(section) {
                merge(&mut merged, Table::from_iter([(section.to_owned(), layer)]));
            }
        }
        if let Some(Value::Table(mut model)) = take("model") {
            if let Some(rope) = model.remove("rope") {
                let rope = Table::from_iter([("rope".to_owned(), rope)]);
                merge(&mut merged, Table::from_iter([("model".to_owned(), Value::Table(rope))]));
            }
            if let Some(key) = model.keys().next() {
                return Err(format!("model.{key} cannot change between stages; model.rope can"));
            }
        }
        let kind = match kind {
            Kind::Evaluate => StageKind::Evaluate,
            Kind::Rft => StageKind::Rft,
            Kind::Rl => StageKind::Rl,
            Kind::Curriculum => {
                let settings: CurriculumSettings = std::mem::take(&mut table).try_into().map_err(|error| one_line(&error))?;
                StageKind::Curriculum(settings)
            }
        };
        if let Some(key) = table.keys().next() {
            return Err(format!(
                "{key}: no key of a stage of kind {:?}; {} can be overridden",
                kind.name(),
                OVERRIDDEN.join(", ")
            ));
        }
        let resolved: RunFile = merged.try_into().map_err(|error| one_line(&error))?;
        resolved.check_sections()?;
        Ok(Stage { name, kind, settings: resolved.stage_settings() })
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
        let mut layers = Layers::from_recipe("smoke").unwrap();
        layers.add_file(&path).map_err(|error| error.to_string())?;
        layers.finish().map_err(|error| error.to_string())?.stages()
    }

    #[test]
    fn a_stage_overrides_single_keys_and_the_next_one_does_not_have_them() {
        let found = stages(
            "[rl]\nsteps = 3\n[[stages]]\nname = \"stage1\"\nkind = \"rl\"\nagent.max_turns = 40\nrl.clip.epsilon_high = 0.3\n\
             [[stages]]\nname = \"easier\"\nkind = \"curriculum\"\nfrom = \"stage1\"\ndrop_unsolved = false\n\
             [[stages]]\nname = \"stage2\"\nkind = \"rl\"\nrl.group_size = 10\n\
             model.rope = { rope_type = \"yarn\", factor = 4.0 }\n",
        )
        .unwrap();
        let [first, curriculum, second] = &found[..] else { panic!("{found:?}") };
        assert_eq!((first.settings.agent.max_turns, second.settings.agent.max_turns), (40, 6));
        assert_eq!((first.settings.rl.clip.epsilon_high, first.settings.rl.steps), (0.3, 3));
        assert_eq!((second.settings.rl.group_size, second.settings.rl.steps), (10, 3));
        assert!(first.settings.rope.is_none() && second.settings.rope.is_some());
        assert_ne!(first.settings.seed, second.settings.seed);
        let StageKind::Curriculum(settings) = &curriculum.kind else { panic!("{curriculum:?}") };
        assert_eq!((settings.from.as_str(), settings.drop_unsolved), ("stage1", false));
    }

    #[test]
    fn what_is_wrong_with_a_stage_is_named() {
        for (text, mention) in [
            ("kind = \"rl\"", "name is missing"),
            ("name = \"a\"", "kind is missing"),
            ("name = \"a\"\nkind = \"sft\"", "sft"),
            ("name = \"a b\"\nkind = \"rl\"", "stages[0].name"),
            ("name = \"a\"\nkind = \"rl\"\nrl.stepps = 3", "stepps"),
            ("name = \"a\"\nkind = \"rl\"\nrl.group_size = 1", "group_size"),
            ("name = \"a\"\nkind = \"rl\"\nfrom = \"b\"", "from"),
            ("name = \"a\"\nkind = \"rl\"\nengine.temperature = 0", "temperature"),
            ("name = \"a\"\nkind = \"rl\"\nmodel.directory = \"x\"", "model.directory"),
            ("name = \"a\"\nkind = \"rl\"\nmodel.rope = { rope_type = \"llama3\" }", "llama3"),
            ("name = \"a\"\nkind = \"curriculum\"\nfrom = \"b\"", "no earlier stage"),
            ("name = \"a\"\nkind = \"rl\"\n[[stages]]\nname = \"a\"\nkind = \"rl\"", "stages[1].name"),
            ("name = \"a\"\nkind = \"rft\"\n[[stages]]\nname = \"b\"\nkind = \"curriculum\"\nfrom = \"a\"", "rft.collect"),
        ] {
            let problem = stages(&format!("[[stages]]\n{text}\n")).expect_err(text);
            assert!(problem.contains(mention) && !problem.contains('\n'), "{text}: {problem}");
        }
    }
}
