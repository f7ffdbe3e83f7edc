//! What is wrong with settings: every room of a settings struct is looked at, and all that is wrong is listed at once.

/// A setting outside its range, or one that contradicts another.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {found}: {remedy}")]
pub struct SettingError {
    /// Name of the field within its settings, with dots where settings hold settings.
    pub field: String,
    pub found: String,
    pub remedy: String,
}

/// All that is wrong with some settings, one line each. Never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.lines())]
pub struct SettingErrors(pub Vec<SettingError>);

impl SettingErrors {
    fn lines(&self) -> String {
        self.0.iter().map(SettingError::to_string).collect::<Vec<_>>().join("\n")
    }

    /// The same, for settings that are the field `name` of larger ones.
    pub fn within(self, name: &str) -> SettingErrors {
        SettingErrors(
            self.0.into_iter().map(|error| SettingError { field: format!("{name}.{}", error.field), ..error }).collect(),
        )
    }
}

/// Steps, passes, turns or tokens that no run comes to: sums and products of them must not overflow.
pub const MOST_COUNTED: usize = 1 << 31;

/// Collects what is wrong.
#[derive(Default)]
pub struct Problems(Vec<SettingError>);

impl Problems {
    /// Notes `found` unless `valid`.
    pub fn unless(&mut self, valid: bool, field: &str, found: impl std::fmt::Display, remedy: &str) {
        if !valid {
            self.0.push(SettingError { field: field.into(), found: found.to_string(), remedy: remedy.into() });
        }
    }

    /// Notes `found` if it is above `most`.
    pub fn at_most(&mut self, field: &str, found: usize, most: usize) {
        self.unless(found <= most, field, found, &format!("give at most {most}"));
    }

    /// Notes what is wrong with the settings in the field `name`.
    pub fn within(&mut self, name: &str, checked: Result<(), SettingErrors>) {
        if let Err(errors) = checked {
            self.0.extend(errors.within(name).0);
        }
    }

    /// Notes what is wrong with settings whose fields are also fields of these.
    pub fn join(&mut self, checked: Result<(), SettingErrors>) {
        if let Err(errors) = checked {
            self.0.extend(errors.0);
        }
    }

    /// What was noted, each once: what several stages have in common is wrong in all of them.
    pub fn finish(self) -> Result<(), SettingErrors> {
        let mut distinct: Vec<SettingError> = Vec::new();
        for problem in self.0 {
            if !distinct.contains(&problem) {
                distinct.push(problem);
            }
        }
        if distinct.is_empty() { Ok(()) } else { Err(SettingErrors(distinct)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_problems_are_listed_with_their_whole_names() {
        let mut inner = Problems::default();
        inner.unless(false, "ddof", 2, "give 0 or 1");
        inner.unless(true, "epsilon", 0.0, "never seen");
        let mut outer = Problems::default();
        outer.unless(false, "group_size", 1, "give at least 2");
        outer.unless(false, "group_size", 1, "give at least 2");
        outer.within("advantage", inner.finish());
        let errors = outer.finish().unwrap_err().within("rl");
        assert_eq!(errors.to_string(), "rl.group_size is 1: give at least 2\nrl.advantage.ddof is 2: give 0 or 1");
        assert_eq!(Problems::default().finish(), Ok(()));
    }
}
