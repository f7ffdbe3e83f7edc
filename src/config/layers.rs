//! Layers of a run file: each later one overrides single keys of the earlier ones.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::RunFile;
use super::recipes::{RECIPES, recipe};

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{origin}: {reason}")]
    Invalid { origin: String, reason: String },
    #[error("--recipe {0}: no such recipe; there are {known}", known = RECIPES.map(|(name, _)| name).join(", "))]
    UnknownRecipe(String),
    #[error("--set {0}: write key=value, for example --set rl.steps=32")]
    BadSet(String),
}

/// A run file in the making.
pub struct Layers {
    merged: Table,
}

impl Layers {
    /// Starts from an embedded recipe.
    pub fn from_recipe(name: &str) -> Result<Layers, ConfigError> {
        let text = recipe(name).ok_or_else(|| ConfigError::UnknownRecipe(name.into()))?;
        let mut layers = Layers { merged: Table::new() };
        layers.add_text(&format!("recipe {name}"), text)?;
        Ok(layers)
    }

    /// Starts from a file alone: a run directory's `run.toml`.
    pub fn from_file(path: &Path) -> Result<Layers, ConfigError> {
        let mut layers = Layers { merged: Table::new() };
        layers.add_file(path)?;
        Ok(layers)
    }

    pub fn add_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_path_buf(), source })?;
        self.add_text(&path.display().to_string(), &text)
    }

    /// `key.with.dots=value`, the value in TOML or, where it is none, plain text.
    pub fn set(&mut self, assignment: &str) -> Result<(), ConfigError> {
        let bad = || ConfigError::BadSet(assignment.into());
        let (key, value) = assignment.split_once('=').ok_or_else(bad)?;
        let (key, value) = (key.trim(), value.trim());
        if key.is_empty() || key.split('.').any(str::is_empty) {
            return Err(bad());
        }
        let value = match format!("value = {value}").parse::<Table>() {
            Ok(mut table) if table.len() == 1 => table.remove("value").ok_or_else(bad)?,
            _ => Value::String(value.into()),
        };
        let layer = key.rsplit('.').fold(value, |inner, part| Value::Table(Table::from_iter([(part.to_owned(), inner)])));
        let Value::Table(layer) = layer else { return Err(bad()) };
        self.add(&format!("--set {assignment}"), layer)
    }

    /// Overrides one key with a value that comes from a flag of its own.
    pub fn set_flag(&mut self, flag: &str, section: &str, key: &str, value: impl Into<Value>) -> Result<(), ConfigError> {
        let inner = Table::from_iter([(key.to_owned(), value.into())]);
        self.add(flag, Table::from_iter([(section.to_owned(), Value::Table(inner))]))
    }

    pub fn finish(self) -> Result<RunFile, ConfigError> {
        let invalid = |reason: String| ConfigError::Invalid { origin: "settings".into(), reason };
        let run_file: RunFile = self.merged.try_into().map_err(|error| invalid(one_line(&error)))?;
        run_file.check().map_err(invalid)?;
        Ok(run_file)
    }

    fn add_text(&mut self, origin: &str, text: &str) -> Result<(), ConfigError> {
        let invalid = |reason| ConfigError::Invalid { origin: origin.into(), reason };
        let layer = text.parse::<Table>().map_err(|error| {
            let line = error.span().map(|span| text[..span.start].matches('\n').count() + 1);
            invalid(format!("{}{}", line.map(|line| format!("line {line}: ")).unwrap_or_default(), error.message()))
        })?;
        self.add(origin, layer)
    }

    /// A layer is read alone first, so that a key nobody knows is blamed on the layer that holds it.
    fn add(&mut self, origin: &str, layer: Table) -> Result<(), ConfigError> {
        if let Err(error) = layer.clone().try_into::<RunFile>() {
            return Err(ConfigError::Invalid { origin: origin.into(), reason: one_line(&error) });
        }
        // A policy comes from a directory or is drawn at random: the later layer decides.
        for (given, other) in [("directory", "initialise"), ("initialise", "directory")] {
            if layer.get("model").and_then(|model| model.get(given)).is_some()
                && let Some(Value::Table(model)) = self.merged.get_mut("model")
            {
                model.remove(other);
            }
        }
        merge(&mut self.merged, layer);
        Ok(())
    }
}

pub(super) fn merge(base: &mut Table, layer: Table) {
    for (key, value) in layer {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(base)), Value::Table(layer)) => merge(base, layer),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

/// The TOML crate explains over several lines; people get one.
pub(super) fn one_line(error: &toml::de::Error) -> String {
    error.to_string().lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_recipe_reads_checks_and_survives_a_round_trip() {
        for (name, _) in RECIPES {
            let run_file = Layers::from_recipe(name).unwrap().finish().unwrap();
            let again: RunFile = toml::from_str(&run_file.to_toml().unwrap()).unwrap();
            assert_eq!(again, run_file, "{name}");
        }
    }

    #[test]
    fn defaults_are_the_quick_starts() {
        let recipe = Layers::from_recipe("quickstart").unwrap().finish().unwrap();
        let mut defaults = RunFile { model: recipe.model.clone(), ..RunFile::default() };
        defaults.run.name = recipe.run.name.clone();
        assert_eq!(defaults, recipe);
    }

    #[test]
    fn a_directory_takes_the_place_of_a_drawn_model_and_the_other_way_round() {
        let mut layers = Layers::from_recipe("quickstart").unwrap();
        layers.set("model.directory=somewhere").unwrap();
        let run_file = layers.finish().unwrap();
        assert_eq!((run_file.model.directory.is_some(), run_file.model.initialise.is_some()), (true, false));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        std::fs::write(&path, run_file.to_toml().unwrap()).unwrap();
        let mut layers = Layers::from_recipe("quickstart").unwrap();
        layers.add_file(&path).unwrap();
        assert_eq!(layers.finish().unwrap(), run_file);
        let mut layers = Layers::from_file(&path).unwrap();
        layers.set("model.initialise={model_type='qwen3'}").unwrap();
        assert!(layers.finish().unwrap().model.directory.is_none());
    }

    #[test]
    fn later_layers_override_single_keys() {
        let mut layers = Layers::from_recipe("quickstart").unwrap();
        layers.set("rl.steps=3").unwrap();
        layers.set("run.name = plain-text").unwrap();
        layers.set("rl.clip.epsilon_high=0.5").unwrap();
        let run_file = layers.finish().unwrap();
        let recipe = Layers::from_recipe("quickstart").unwrap().finish().unwrap();
        assert_eq!((run_file.rl.steps, run_file.run.name.as_str()), (3, "plain-text"));
        assert_eq!(run_file.rl.clip.epsilon_high, 0.5);
        assert_eq!(run_file.rl.clip.epsilon_low, recipe.rl.clip.epsilon_low);
        assert_eq!(run_file.rft, recipe.rft);
    }

    #[test]
    fn what_is_wrong_is_named_in_one_line() {
        let refused = |assignment: &str| {
            let mut layers = Layers::from_recipe("quickstart").unwrap();
            let error = match layers.set(assignment) {
                Ok(()) => layers.finish().expect_err(assignment).to_string(),
                Err(error) => error.to_string(),
            };
            assert!(!error.contains('\n'), "{error}");
            error
        };
        assert!(refused("rl.stepps=3").contains("stepps"));
        assert!(refused("rl.steps=many").contains("--set rl.steps=many"));
        assert!(refused("nothing").contains("key=value"));
        assert!(refused("=3").contains("key=value"));
        assert!(refused("rl.group_size=1").contains("rl.group_size"));
        assert!(refused("run.device=tpu").contains("run.device"));
        assert!(refused("engine.temperature=nan").contains("engine.temperature"));
        assert!(refused("engine.temperature=0").contains("engine.temperature"));
        assert!(refused("run.name=../elsewhere").contains("run.name"));
        assert!(matches!(Layers::from_recipe("none"), Err(ConfigError::UnknownRecipe(_))));
    }
}
