//! Layers of a run file: each later one overrides single keys of the earlier ones. All that is wrong, in any layer or in
//! what comes of them together, is listed at once.

use std::collections::BTreeMap;
use std::path::Path;

use toml::{Table, Value};

use super::RunFile;
use super::keys::{Lacking, ROOT, STAGE, nearest, take_incomplete};
use super::recipes::{RECIPES, recipe};
use super::scale::{self, Change};
use super::shape::{Field, Shape};
use super::text::{Text, element_name, join};

/// What is wrong with the settings given, one line for each problem. Never empty.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{}", self.text())]
pub struct ConfigError(pub Vec<String>);

impl ConfigError {
    fn text(&self) -> String {
        match &self.0[..] {
            [line] => line.clone(),
            lines => format!("{} problems in the settings\n{}", lines.len(), lines.join("\n")),
        }
    }
}

/// A run file in the making.
#[derive(Default)]
pub struct Layers {
    merged: Table,
    /// Where each key that was given was given last: `my.toml line 3`, `--set rl.steps=3`.
    places: BTreeMap<String, String>,
    problems: Vec<String>,
    changes: Vec<Change>,
    /// A layer could not be read: what the others come to without it says nothing.
    unread: bool,
}

impl Layers {
    /// Starts from an embedded recipe.
    pub fn from_recipe(name: &str) -> Layers {
        let mut layers = Layers::default();
        match recipe(name) {
            Some(text) => layers.add_text(&format!("recipe {name}"), text),
            None => {
                layers.unread(format!("--recipe {name}: no such recipe; there are {}", RECIPES.map(|(name, _)| name).join(", ")))
            }
        }
        layers
    }

    /// Starts from a file alone: a run directory's `run.toml`.
    pub fn from_file(path: &Path) -> Layers {
        let mut layers = Layers::default();
        layers.add_file(path);
        layers
    }

    pub fn add_file(&mut self, path: &Path) {
        match std::fs::read_to_string(path) {
            Ok(text) => self.add_text(&path.display().to_string(), &text),
            Err(error) => self.unread(format!("{}: {error}", path.display())),
        }
    }

    /// `key.with.dots=value`, the value in TOML or, where it is none, plain text.
    pub fn set(&mut self, assignment: &str) {
        let origin = format!("--set {}", assignment.replace(char::is_control, " "));
        let Some((key, value)) = assignment.split_once('=').map(|(key, value)| (key.trim(), value.trim())) else {
            return self.unread(format!("{origin}: write key=value, for example --set rl.steps=32"));
        };
        if key.is_empty() || key.split('.').any(str::is_empty) {
            return self.unread(format!("{origin}: write key=value, for example --set rl.steps=32"));
        }
        let value = match format!("value = {value}").parse::<Table>() {
            Ok(mut table) if table.len() == 1 => table.remove("value").unwrap_or_else(|| Value::String(value.into())),
            _ => Value::String(value.into()),
        };
        let layer = key.rsplit('.').fold(value, |inner, part| Value::Table(Table::from_iter([(part.to_owned(), inner)])));
        let Value::Table(mut layer) = layer else { return };
        if let Err(problem) = self.name_stage(&mut layer) {
            return self.unread(format!("{origin}: {problem}"));
        }
        self.add(layer, &|_| origin.clone());
    }

    /// `stages.NAME.key` is a key of the stage of that name: the list becomes the one so far with that stage's table merged.
    fn name_stage(&self, layer: &mut Table) -> Result<(), String> {
        let Some(Value::Table(named)) = layer.get("stages") else { return Ok(()) };
        let mut stages = self.merged.get("stages").and_then(Value::as_array).cloned().unwrap_or_default();
        let name_of = |stage: &Value| stage.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        for (name, keys) in named {
            let names = stages.iter().map(name_of).collect::<Vec<_>>().join(", ");
            let Some(Value::Table(stage)) = stages.iter_mut().find(|stage| name_of(stage) == *name) else {
                let there =
                    if names.is_empty() { "the run file lists no [[stages]]".into() } else { format!("there are {names}") };
                return Err(format!("no stage is called {name}; {there}"));
            };
            let Value::Table(keys) = keys else { return Err(format!("give a key of stage {name}, such as rl.steps")) };
            merge(stage, keys.clone(), &STAGE);
        }
        layer.insert("stages".into(), Value::Array(stages));
        Ok(())
    }

    /// Overrides one key with a value that comes from a flag of its own.
    pub fn set_flag(&mut self, flag: &str, section: &str, key: &str, value: impl Into<Value>) {
        let inner = Table::from_iter([(key.to_owned(), value.into())]);
        self.add(Table::from_iter([(section.to_owned(), Value::Table(inner))]), &|_| flag.to_owned());
    }

    /// Makes what the layers so far come to small (`scale.rs`).
    pub fn scale_down(&mut self) {
        // What is wrong with it is said at the end.
        let Ok(run_file) = self.merged.clone().try_into::<RunFile>() else { return };
        let (scaled, changes) = match scale::tiny(&run_file) {
            Ok(scaled) => scaled,
            Err(problem) => return self.unread(problem),
        };
        for change in &changes {
            self.places.insert(change.key.clone(), "--scale tiny".to_owned());
        }
        match Table::try_from(scaled) {
            Ok(merged) => (self.merged, self.changes) = (merged, changes),
            Err(error) => self.unread(format!("--scale tiny: {error}")),
        }
    }

    /// What scaling down has changed.
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// Notes a problem that no layer can be read with.
    pub fn unread(&mut self, problem: String) {
        self.problems.push(problem);
        self.unread = true;
    }

    /// The run file that these layers come to.
    ///
    /// # Errors
    /// All that is wrong: keys that do not exist, values of the wrong kind, settings that make no sense alone or together.
    pub fn finish(mut self) -> Result<RunFile, ConfigError> {
        let read = if self.unread { None } else { self.resolve() };
        match read {
            Some(run_file) if self.problems.is_empty() => Ok(run_file),
            _ => Err(ConfigError(self.problems)),
        }
    }

    fn resolve(&mut self) -> Option<RunFile> {
        let mut merged = Value::Table(std::mem::take(&mut self.merged));
        // The rest is looked at without what is incomplete.
        for Lacking { name, field, part } in take_incomplete(&mut merged) {
            if self.places.contains_key(&name) {
                continue; // it was given and refused
            }
            let table = name.rsplit_once('.').map_or("", |(table, _)| table);
            let place =
                self.places.get(table).or_else(|| self.places.get(&part)).map_or(String::new(), |place| format!(" ({place})"));
            self.problems.push(format!("{name} is absent: set it, {}{place}", field.describe()));
        }
        let run_file: RunFile = match merged.try_into() {
            Ok(run_file) => run_file,
            Err(error) => {
                self.problems.push(one_line(&error));
                return None;
            }
        };
        if let Err(errors) = run_file.check() {
            let with_place = |error: crate::algorithm::SettingError| match self.places.get(&error.field) {
                Some(place) => format!("{error} ({place})"),
                None => error.to_string(),
            };
            self.problems.extend(errors.0.into_iter().map(with_place));
        }
        Some(run_file)
    }

    fn add_text(&mut self, origin: &str, text: &str) {
        match Text::read(text) {
            Ok(Text { table, places }) => self.add(table, &|key| match places.get(key) {
                Some(place) => format!("{origin} line {}", place.line),
                None => origin.to_owned(),
            }),
            Err(problems) => {
                self.problems.extend(problems.iter().map(|problem| format!("{origin}: {problem}")));
                self.unread = true;
            }
        }
    }

    /// Adds what is right in a layer. `place` says where a key of it was given.
    fn add(&mut self, layer: Table, place: &dyn Fn(&str) -> String) {
        let mut reading = Reading { place, problems: &mut self.problems, places: &mut self.places };
        let layer = reading.table("", layer, &ROOT);
        // A policy comes from a directory or is drawn at random: the later layer decides.
        for (given, other) in [("directory", "initialise"), ("initialise", "directory")] {
            if layer.get("model").and_then(|model| model.get(given)).is_some()
                && let Some(Value::Table(model)) = self.merged.get_mut("model")
            {
                model.remove(other);
            }
        }
        merge(&mut self.merged, layer, &ROOT);
    }
}

/// Switches an optional setting off that an earlier layer has switched on: TOML has no word for nothing.
const OFF: &str = "off";

fn is_off(field: &Field, value: &Value) -> bool {
    field.optional && field.shape != Shape::Text && value.as_str() == Some(OFF)
}

/// A layer on its way in.
struct Reading<'a> {
    place: &'a dyn Fn(&str) -> String,
    problems: &'a mut Vec<String>,
    places: &'a mut BTreeMap<String, String>,
}

impl Reading<'_> {
    /// What of the table is right.
    fn table(&mut self, prefix: &str, table: Table, known: &Field) -> Table {
        let mut right = Table::new();
        for (key, value) in table {
            let name = join(prefix, &key);
            match known.field(&key) {
                Some(field) => {
                    if let Some(value) = self.value(&name, value, field) {
                        right.insert(key, value);
                    }
                }
                None => self.problems.push(self.no_such_key(&name, known)),
            }
        }
        right
    }

    fn value(&mut self, name: &str, value: Value, field: &Field) -> Option<Value> {
        self.places.insert(name.to_owned(), (self.place)(name));
        if is_off(field, &value) {
            return Some(value);
        }
        if !field.holds(&value) {
            let expected = field.describe();
            self.problems.push(format!("{name} in {}: found {}, expected {expected}", (self.place)(name), describe(&value)));
            return None;
        }
        match (value, &field.shape) {
            (Value::Table(table), Shape::Table(_)) => Some(Value::Table(self.table(name, table, field))),
            (Value::Array(values), Shape::List(of)) => {
                let element = |(index, value): (usize, Value)| {
                    let own_name = value.get("name").and_then(Value::as_str).map(str::to_owned);
                    let of = if name == "stages" { &STAGE } else { of.as_ref() };
                    self.value(&element_name(name, index, own_name.as_deref()), value, of)
                };
                Some(Value::Array(values.into_iter().enumerate().filter_map(element).collect()))
            }
            (Value::Table(table), Shape::Free(of)) => {
                let pair = |(key, value)| Some((String::clone(&key), self.value(&join(name, &key), value, of)?));
                Some(Value::Table(table.into_iter().filter_map(pair).collect()))
            }
            (value, _) => Some(value),
        }
    }

    fn no_such_key(&self, name: &str, known: &Field) -> String {
        let siblings: Vec<&str> = known.fields().iter().map(|(name, _)| *name).collect();
        let hint = match nearest(name, &siblings) {
            Some(key) => format!("did you mean {key}?"),
            None => format!("there are {}", siblings.join(", ")),
        };
        format!("{name} in {}: no such key; {hint}", (self.place)(name))
    }
}

/// What was found, in a few words.
fn describe(value: &Value) -> String {
    match value {
        Value::Table(_) => "a table".into(),
        Value::Array(_) => "a list".into(),
        Value::String(text) => format!("text {text:?}"),
        value => value.to_string(),
    }
}

/// Lays `layer` over `base`; `known` is what both are.
pub(super) fn merge(base: &mut Table, layer: Table, known: &Field) {
    for (key, value) in layer {
        let field = known.field(&key);
        match (base.get_mut(&key), value) {
            (_, value) if field.is_some_and(|field| is_off(field, &value)) => {
                base.remove(&key);
            }
            (Some(Value::Table(base)), Value::Table(layer)) => merge(base, layer, field.unwrap_or(known)),
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

    fn quickstart() -> RunFile {
        Layers::from_recipe("quickstart").finish().unwrap()
    }

    fn lines(layers: Layers) -> Vec<String> {
        layers.finish().map(|_| Vec::new()).unwrap_or_else(|error| error.0)
    }

    #[test]
    fn every_recipe_reads_checks_and_survives_a_round_trip() {
        for (name, _) in RECIPES {
            let run_file = Layers::from_recipe(name).finish().unwrap_or_else(|error| panic!("{name}: {error}"));
            let again: RunFile = toml::from_str(&run_file.to_toml().unwrap()).unwrap();
            assert_eq!(again, run_file, "{name}");
        }
    }

    #[test]
    fn defaults_are_the_quick_starts() {
        let recipe = quickstart();
        let mut defaults = RunFile { model: recipe.model.clone(), ..RunFile::default() };
        defaults.run.name = recipe.run.name.clone();
        assert_eq!(defaults, recipe);
    }

    #[test]
    fn a_directory_takes_the_place_of_a_drawn_model_and_the_other_way_round() {
        let mut layers = Layers::from_recipe("quickstart");
        layers.set("model.directory=somewhere");
        let run_file = layers.finish().unwrap();
        assert_eq!((run_file.model.directory.is_some(), run_file.model.initialise.is_some()), (true, false));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        std::fs::write(&path, run_file.to_toml().unwrap()).unwrap();
        let mut layers = Layers::from_recipe("quickstart");
        layers.add_file(&path);
        assert_eq!(layers.finish().unwrap(), run_file);
        let mut layers = Layers::from_file(&path);
        layers.set("model.initialise={model_type='qwen3'}");
        assert!(layers.finish().unwrap().model.directory.is_none());
    }

    #[test]
    fn later_layers_override_single_keys() {
        let mut layers = Layers::from_recipe("quickstart");
        layers.set("rl.steps=3");
        layers.set("rl.steps=4");
        layers.set("run.name = plain-text");
        layers.set("rl.loss.clip.epsilon_high=0.5");
        let run_file = layers.finish().unwrap();
        assert_eq!((run_file.rl.steps, run_file.run.name.as_str()), (4, "plain-text"));
        assert_eq!(run_file.rl.loss.clip.epsilon_high, 0.5);
        assert_eq!(run_file.rl.loss.clip.epsilon_low, quickstart().rl.loss.clip.epsilon_low);
        assert_eq!(run_file.rft, quickstart().rft);
    }

    #[test]
    fn an_optional_setting_is_switched_off_again() {
        let mut layers = Layers::from_recipe("quickstart");
        layers.set("rl.loss.clip.dual_clip=3.0");
        layers.set("rl.loss.clip.dual_clip=off");
        assert_eq!(layers.finish().unwrap(), quickstart());
        let mut layers = Layers::from_recipe("quickstart");
        layers.set("rl.steps=off");
        assert_eq!(lines(layers).len(), 1);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place_and_the_nearest_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("my.toml");
        let text = "[rl]\n# three\nstepps = 3\ngroup_size = \"many\"\n[engin]\ntemperature = 1\n[agent]\nmax_turns = 0\n";
        std::fs::write(&path, text).unwrap();
        let mut layers = Layers::from_recipe("quickstart");
        layers.add_file(&path);
        layers.set("rl.tasks_per_step=-1");
        layers.set("engine.temperature=nan");
        let file = path.display();
        assert_eq!(
            lines(layers),
            [
                format!("engin in {file} line 5: no such key; did you mean engine?"),
                format!("rl.group_size in {file} line 4: found text \"many\", expected whole number"),
                format!("rl.stepps in {file} line 3: no such key; did you mean rl.steps?"),
                "rl.tasks_per_step in --set rl.tasks_per_step=-1: found -1, expected whole number".to_owned(),
                format!("agent.max_turns is 0: give at least 1 ({file} line 8)"),
                "engine.temperature is NaN: give a finite number of at least 0 (--set engine.temperature=nan)".to_owned(),
            ]
        );
    }

    #[test]
    fn what_cannot_be_read_is_said_and_nothing_that_follows_from_it() {
        let mut layers = Layers::from_recipe("none");
        layers.set("nothing");
        layers.set("=3");
        layers.set("rl.stepps=3");
        let lines = lines(layers);
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert!(lines[0].contains("quickstart") && lines[1].contains("key=value") && lines[2].contains("key=value"));
    }

    #[test]
    fn what_a_table_lacks_is_named_beside_what_is_wrong_elsewhere() {
        let mut layers = Layers::from_recipe("quickstart");
        for given in [
            "rl.reward.step_penalty.weight=1",
            "rl.loss.correction.rejections=[{statistic='k1'}]",
            "rl.group_size=1",
            "rollout.environment={A=3, B='b'}",
            "stages=[{kind='rl'}, {name='b'}]",
        ] {
            layers.set(given);
        }
        let found = lines(layers);
        for (start, origin) in [
            ("rollout.environment.A in", "rollout.environment={"),
            ("rl.reward.step_penalty.free_turns is absent: set it, whole number (--set rl.reward", "step_penalty.weight=1)"),
            ("rl.reward.step_penalty.turn_limit is absent: ", "step_penalty.weight=1)"),
            ("rl.loss.correction.rejections[0].over is absent: set it, \"token\" or ", "rejections=["),
            ("rl.loss.correction.rejections[0].upper is absent: ", "rejections=["),
            ("stages[0].name is absent: set it, text", "stages=["),
            ("stages.b.kind is absent: ", "stages=["),
            ("rl.group_size is 1: ", "--set rl.group_size=1"),
        ] {
            let about = found.iter().filter(|line| line.starts_with(start) && line.contains(origin)).count();
            assert_eq!(about, 1, "{start}: {found:?}");
        }
        assert_eq!(found.len(), 8, "{found:?}");
    }

    #[test]
    fn numbers_that_no_machine_has_are_refused() {
        let counts = [
            ("rl.group_size", "rl.group_size"),
            ("rl.tasks_per_step", "rl.group_size"),
            ("rl.dynamic_sampling.tasks_per_batch", "rl.group_size"),
            ("rl.sequences_per_update", "rl.sequences_per_update"),
            ("rl.steps", "rl.steps"),
            ("rl.passes", "rl.passes"),
            ("rft.candidates", "rft.candidates"),
            ("rft.attempts_per_task", "rft.attempts_per_task"),
            ("rft.steps", "rft.steps"),
            ("rft.passes", "rft.passes"),
            ("evaluate.samples", "evaluate.samples"),
            ("evaluate.tasks", "evaluate.samples"),
            ("agent.max_turns", "agent.max_turns"),
            ("agent.max_tokens", "agent.max_tokens"),
            ("agent.max_turn_tokens", "agent.max_turn_tokens"),
            ("run.threads", "run.threads"),
            ("sandbox.limits.memory_bytes", "sandbox.limits.memory_bytes"),
        ];
        let others = [
            ("agent.episode_seconds=inf", "agent.episode_seconds"),
            ("rl.reward.overlong_penalty={ token_limit = 0, buffer_tokens = 0 }", "rl.reward.overlong_penalty.token_limit"),
            ("model.rope.factor=nan", "model.rope"),
            ("run.name=\"two\\nlines\"", "run.name"),
        ];
        let counts = counts.map(|(key, named)| (format!("{key}={}", i64::MAX), named));
        for (given, named) in counts.into_iter().chain(others.map(|(given, named)| (given.to_owned(), named))) {
            let mut layers = Layers::from_recipe("quickstart");
            layers.set(&given);
            let found = lines(layers);
            assert!(found.iter().any(|line| line.contains(named)), "{given}: {found:?}");
            assert!(found.iter().all(|line| !line.contains('\n')), "{given}: {found:?}");
        }
    }

    #[test]
    fn one_cause_is_said_once() {
        let mut layers = Layers::from_recipe("quickstart");
        layers.set("model.rope={rope_type='yarn', factor=2, original_max_position_embeddings=100}");
        assert_eq!(lines(layers).len(), 1, "all usual stages have it in common");
        let mut layers = Layers::from_recipe("quickstart");
        layers.set("stages.rl.rl.steps=3");
        assert!(lines(layers)[0].ends_with("no stage is called rl; the run file lists no [[stages]]"));
        let mut layers = Layers::from_recipe("quickstart");
        layers.set("rl.stepps=3\nrl.steps=4");
        assert!(!lines(layers)[0].contains('\n'));
    }

    #[test]
    fn settings_that_contradict_each_other_are_all_listed() {
        let mut layers = Layers::from_recipe("quickstart");
        for wrong in ["engine.temperature=0", "run.name=../elsewhere", "run.device=tpu", "rl.group_size=1", "checkpoint.keep=0"] {
            layers.set(wrong);
        }
        let lines = lines(layers);
        for key in ["engine.temperature", "run.name", "run.device", "rl.group_size", "checkpoint.keep"] {
            assert_eq!(lines.iter().filter(|line| line.starts_with(key)).count(), 1, "{key}: {lines:?}");
        }
    }
}
